"""Published networks for genomics, chemistry, astronomy, eyes and sleep."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
from real_networks_foreign import (
    LOGITS,
    NUMBERS,
    SOFTMAX,
    Foreign,
    folder,
    module,
    module_file,
    package_folder,
    weights,
)
from torch import Tensor, nn

CONTIGS = "contigs of the package tiara, tiara/test/test_data"
REACTIONS = (  # the examples of rxnmapper's README, and four textbook reactions
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
    "CC(=O)O.OCC>>CC(=O)OCC",
    "BrCc1ccccc1.NCC>>CCNCc1ccccc1",
    "OB(O)c1ccccc1.Brc1ccncc1>>c1ccc(-c2ccncc2)cc1",
    "O=Cc1ccccc1.CC(C)=O>>CC(=O)C=Cc1ccccc1",
)


def tiara(networks: Path) -> Foreign:
    """Tiara's second stage, softmax included; inputs as it makes them, weighted counts of 7 letters."""
    package = "tiara==1.0.2"
    model = module_file(package_folder("tiara", package) / "src/models.py").NNet2(16384, 128, 64, 3, 0.2)
    files = package_folder("tiara", package)
    model.load_state_dict(weights(files / "models/nnet-models/second_nnet_kmer_7.pkl"))
    import numpy as np

    counts = _words(_contigs(), ["".join(w) for w in product("ACGT", repeat=7)])
    weighted = (
        counts * torch.from_numpy(np.load(files / "models/tfidf-models/k7-second-stage/model.npy")).float()
    )
    return Foreign(model.eval(), (nn.functional.normalize(weighted, dim=1),), f"24 {CONTIGS}", SOFTMAX)


def semibin(networks: Path) -> Foreign:
    """SemiBin2, global model: the embedding of a contig."""
    files = package_folder("SemiBin", "semibin==2.6.0")
    library = module("SemiBin.semi_supervised_model", "semibin==2.6.0", ("SemiBin.markers",))
    model = library.model_load(str(files / "models/global_model.pt"), torch.device("cpu"))
    words = module("SemiBin.generate_kmer", "semibin==2.6.0").generate_feature_mapping(4)[0]
    counts = torch.zeros(24, 136).index_add_(
        1, torch.tensor(list(words.values())), _words(_contigs(), list(words))
    )
    features = (counts + 1e-5) / (counts + 1e-5).sum(1, keepdim=True)
    return Foreign(model.encoder1.eval(), (features,), f"24 {CONTIGS}", NUMBERS)


def _contigs() -> list[str]:
    """Eight pieces of 5,000 letters of each of three kinds."""
    files = package_folder("tiara", "tiara==1.0.2") / "test/test_data"
    pieces = []
    for kind in ("plast", "mitochondria", "bacteria"):
        records = (files / f"{kind}_fr.fasta").read_text().split(">")[1:]
        letters = ["".join(r.split("\n")[1:]).upper() for r in records]
        pieces += [r[:5000] for r in letters if len(r) >= 5000][:8]
    return pieces


def _words(sequences: list[str], words: list[str]) -> Tensor:
    index, size = {word: i for i, word in enumerate(words)}, len(words[0])
    counts = torch.zeros(len(sequences), len(words))
    for row, sequence in zip(counts, sequences, strict=True):
        found = [index.get(sequence[i : i + size]) for i in range(len(sequence) - size + 1)]
        row += torch.bincount(torch.tensor([i for i in found if i is not None]), minlength=len(words))
    return counts


class AtMask(nn.Module):
    """The logits of the masked token alone."""

    def __init__(self, albert: nn.Module) -> None:
        super().__init__()
        self.albert = albert

    def forward(self, tokens: Tensor, attention: Tensor, position: Tensor) -> Tensor:
        hidden = self.albert.albert(tokens, attention_mask=attention).last_hidden_state
        index = position[:, None, None].expand(-1, 1, hidden.shape[-1])
        return self.albert.predictions(hidden.gather(1, index)).squeeze(1)


def rxnmapper(networks: Path) -> Foreign:
    """RXNMapper: which token is masked in a reaction."""
    package = "rxnmapper==0.4.3"
    files = package_folder("rxnmapper", package) / "models/transformers/albert_heads_8_uspto_all_1310k"
    transformers = module("transformers", "transformers")
    config = transformers.AlbertConfig(**json.loads((files / "config.json").read_text()))
    albert = transformers.AlbertForMaskedLM(config)
    saved = weights(files / "pytorch_model.bin")
    missing, _ = albert.load_state_dict({k: v for k, v in saved.items() if "pooler" not in k}, strict=False)
    assert not [k for k in missing if "position_ids" not in k and "decoder.bias" not in k], missing
    pattern = re.search(r'SMI_REGEX_PATTERN = r"(.*)"', (files.parents[2] / "smiles_utils.py").read_text())
    assert pattern is not None
    inputs = _masked(re.compile(pattern[1]), (files / "vocab.txt").read_text().split())
    return Foreign(
        AtMask(albert).eval(), inputs, f"{len(REACTIONS)} reactions, two masked tokens each", LOGITS
    )


def _masked(letters: re.Pattern[str], vocabulary: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    number = {token: i for i, token in enumerate(vocabulary)}
    rows, positions = [], []
    for reaction in REACTIONS:
        tokens = ["[CLS]", *letters.findall(reaction), "[SEP]"]
        for part in (3, 5):
            position = part * len(tokens) // 6
            row = [number.get(t, number["[UNK]"]) for t in tokens]
            row[position] = number["[MASK]"]
            rows.append(torch.tensor(row))
            positions.append(position)
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=number["[PAD]"])
    return padded, (padded != number["[PAD]"]).long(), torch.tensor(positions)


class BatchFirst(nn.Module):
    """A network for [time, batch, features] that takes [batch, time, features]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.transpose(0, 1))


def supernnova(networks: Path) -> Foreign:
    """SuperNNova as the Fink broker uses it: supernovae of type Ia against others."""
    files = (
        folder(networks, "astrolabsoftware/fink-science")
        / "fink_science/data/models/snn_models/snn_snia_vs_nonia"
    )
    library = module_file(package_folder("supernnova", "supernnova==3.0.51") / "training/vanilla_rnn.py")
    model = library.VanillaRNN(8, SimpleNamespace(**json.loads((files / "cli_args.json").read_text())))
    model.load_state_dict(weights(files / "model.pt"))
    norm = json.loads((files / "data_norm.json").read_text())
    x = _light_curves(norm)
    return Foreign(BatchFirst(model).eval(), (x,), "16 synthetic light curves of 24 nights", LOGITS)


def _light_curves(norm: dict[str, dict[str, float]], count: int = 16, nights: int = 24) -> Tensor:
    """Rise and fall of a supernova in two filters, with noise, scaled as the network expects."""
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=generator)

    step = torch.cat([torch.zeros(count, 1), 1 + 3 * torch.rand(count, nights - 1, generator=generator)], 1)
    time = step.cumsum(1) - uniform(10, 25)
    rise, fall, height = uniform(2, 6), uniform(12, 40), uniform(200, 2000)
    shape = (-time / fall).exp() / (1 + (-time / rise).exp())
    green = torch.rand(count, nights, generator=generator) < 0.5
    flux = torch.stack([height * shape, height * uniform(0.6, 1.4) * shape], 2)
    error = 15 + 0.05 * flux
    flux = flux + error * torch.randn(flux.shape, generator=generator)
    seen = torch.stack([green, ~green], 2)
    values = torch.cat([flux * seen, error * seen, step[..., None]], 2)
    names = ("FLUXCAL_g", "FLUXCAL_r", "FLUXCALERR_g", "FLUXCALERR_r", "delta_time")
    low, mean, std = (torch.tensor([norm[n][key] for n in names]) for key in ("min", "mean", "std"))
    scaled = ((values - low + 1e-5).clamp_min(1e-5).log() - mean) / std
    filters = torch.stack([green, torch.zeros_like(green), ~green], 2)
    return torch.cat([scaled, filters.float()], 2)


def ritnet(networks: Path) -> Foreign:
    """RITnet: four parts of an eye, for every pixel."""
    import numpy as np
    from PIL import Image

    repository = folder(networks, "AayushKrChaudhary/RITnet")
    model = module_file(repository / "densenet.py").DenseNet2D(dropout=True, prob=0.2)
    model.load_state_dict(weights(repository / "best_model.pkl"))
    images = []
    for path in sorted((repository / "test/mask").glob("*.jpg"))[:2]:
        pixels = torch.from_numpy(np.asarray(Image.open(path).convert("L")).copy()).float()[:, :400]
        images.append(nn.functional.avg_pool2d(pixels[None, None], 2)[:, :, 32:288, 4:196] / 127.5 - 1)
    note = "2 eyes of its repository, test/mask, half the size, cut to 256 x 192"
    return Foreign(model.eval(), (torch.cat(images),), note, LOGITS)


EPOCHS = 21


class SleepStages(nn.Module):
    """A network like those for sleep staging: convolutions in every epoch, recurrent layers over epochs.

    As in several public ones, the epochs of a night lie in the batch: [nights * 21, ...].
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 16, 25, 4), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(4),
            nn.Conv1d(16, 32, 5), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(),
        )  # fmt: skip
        self.over_epochs = nn.GRU(64, 48, num_layers=2, dropout=0.5, bidirectional=True, batch_first=True)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(96, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x).view(-1, EPOCHS, 64)
        return self.head(self.dropout(self.over_epochs(features)[0]).flatten(0, 1))


def sleep(networks: Path) -> Foreign:
    """Our own network for sleep stages, trained on synthetic nights."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = SleepStages()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        x, stages = _nights(8, generator)
        loss = nn.functional.cross_entropy(model(x), stages)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, _ = _nights(4, generator)
    return Foreign(model.eval(), (x,), "4 synthetic nights; trained for 150 steps on others", LOGITS)


def _nights(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Waves whose frequency and height depend on the stage, which lasts a few epochs, in strong noise."""
    change = torch.rand(count, EPOCHS, generator=generator) < 0.3
    fresh = torch.randint(0, 5, (count, EPOCHS), generator=generator)
    stages = fresh.clone()
    for i in range(1, EPOCHS):
        stages[:, i] = torch.where(change[:, i], fresh[:, i], stages[:, i - 1])
    frequency = torch.tensor([10.0, 7.0, 13.0, 2.0, 6.0])[stages][..., None]
    height = torch.tensor([0.8, 0.7, 0.8, 1.2, 0.6])[stages][..., None]
    phase = 6.283 * torch.rand(count, EPOCHS, 1, generator=generator)
    wave = height * (6.283 * frequency * torch.linspace(0, 3, 300) + phase).sin()
    x = wave + 2 * torch.randn(wave.shape, generator=generator)
    return x.flatten(0, 1).unsqueeze(1), stages.flatten()
