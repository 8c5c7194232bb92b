"""transformers: images, sound, text with images, time series."""

from __future__ import annotations

import functools
from typing import Any

import torch

from catalogue import Built, Only, add, images, settle

LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
NOISE = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "num_labels": 5}
PATCHES = LAYERS | NOISE | {"image_size": 32, "patch_size": 8}
SPEECH = LAYERS | {"num_labels": 3, "conv_dim": [16, 16], "conv_kernel": [5, 3], "conv_stride": [5, 2]}
SPEECH |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
SPEECH |= {"classifier_proj_size": 16, "vocab_size": 9}
# SpecAugment masks inputs by numpy while training; it is no part of the network's dropout
SPEECH |= {"apply_spec_augment": False, "layerdrop": 0.0, "hidden_dropout": 0.1, "attention_dropout": 0.1}
SPEECH |= {"activation_dropout": 0.1, "feat_proj_dropout": 0.1, "final_dropout": 0.1}

# name -> configuration, network, options of the configuration
VISION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTConfig", "ViTForImageClassification", PATCHES),
    "vit_eager": ("ViTConfig", "ViTForImageClassification", PATCHES | {"eager": True}),
    "deit": ("DeiTConfig", "DeiTForImageClassification", PATCHES),
    "beit": ("BeitConfig", "BeitForImageClassification", PATCHES | {"drop_path_rate": 0.1}),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", PATCHES | {"drop_path_rate": 0.1}),
    "swin": (
        "SwinConfig",
        "SwinForImageClassification",
        NOISE
        | {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4]}
        | {"window_size": 4, "drop_path_rate": 0.1},
    ),
    "convnextv2": (
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "drop_path_rate": 0.2, "num_labels": 5},
    ),
    # element-wise dropout in its blocks; averages with a window far larger than the image
    "efficientnet": (
        "EfficientNetConfig",
        "EfficientNetForImageClassification",
        {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "dropout_rate": 0.1}
        | {"drop_connect_rate": 0.1, "image_size": 32, "num_labels": 5, "initializer_range": 0.2},
    ),
    "mobilevit": (
        "MobileViTConfig",
        "MobileViTForImageClassification",
        NOISE
        | {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32], "expand_ratio": 1.0}
        | {"image_size": 32},
    ),
    "segformer": (
        "SegformerConfig",
        "SegformerForImageClassification",
        NOISE
        | {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
    ),
    "segformer_semantic": (
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        NOISE
        | {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
        | {"decoder_hidden_size": 32, "num_labels": 2},
    ),
}


def _configured(config: str, model: str, options: dict[str, Any]) -> Any:
    import transformers

    options = dict(options)
    attention = {"attn_implementation": "eager"} if options.pop("eager", False) else {}
    return getattr(transformers, model)(getattr(transformers, config)(**options, **attention))


def _vision(config: str, model: str, options: dict[str, Any]) -> Built:
    x = images(size=32)
    return settle(_configured(config, model, options), x), x


for _name, _arguments in VISION.items():
    add(f"transformers_{_name}", functools.partial(_vision, *_arguments), "transformers")


def _wav2vec2() -> Built:
    return _configured("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", SPEECH), torch.randn(3, 200)


def _hubert() -> Built:
    return _configured("HubertConfig", "HubertForSequenceClassification", SPEECH), torch.randn(3, 200)


def _whisper() -> Built:
    options = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    options |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8}
    options |= {"max_source_positions": 16, "dropout": 0.1, "attention_dropout": 0.1, "num_labels": 3}
    options |= {"activation_dropout": 0.1, "vocab_size": 99, "pad_token_id": 0, "classifier_proj_size": 16}
    options |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = _configured("WhisperConfig", "WhisperForAudioClassification", options)
    return model, ((), {"input_features": torch.randn(3, 8, 32)})


def _clip() -> Built:
    tower = LAYERS | {"attention_dropout": 0.1, "projection_dim": 16}
    text = tower | {"vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    picture = tower | {"image_size": 32, "patch_size": 8}
    options = {"text_config": text, "vision_config": picture, "projection_dim": 16}
    ids = torch.cat([torch.randint(3, 99, (3, 7)), torch.full((3, 1), 2)], 1)
    model = _configured("CLIPConfig", "CLIPModel", options)
    return Only(model, "logits_per_image"), ((), {"input_ids": ids, "pixel_values": images(size=32)})


def _patchtst() -> Built:
    options = {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8}
    options |= {"d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    options |= {"attention_dropout": 0.1, "ff_dropout": 0.1, "path_dropout": 0.1, "head_dropout": 0.1}
    options |= {"num_targets": 3, "use_cls_token": True}
    model = _configured("PatchTSTConfig", "PatchTSTForClassification", options)
    return model, ((), {"past_values": torch.randn(3, 32, 2)})


def _time_series() -> Built:
    options = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "d_model": 16}
    options |= {"num_time_features": 1, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
    options |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32}
    options |= {"decoder_ffn_dim": 32, "use_cache": False, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    model = _configured("TimeSeriesTransformerConfig", "TimeSeriesTransformerModel", options)
    past = {"past_values": torch.rand(3, 10) + 1, "past_observed_mask": torch.ones(3, 10)}
    past["past_time_features"] = torch.randn(3, 10, 1)
    future = {"future_values": torch.rand(3, 4) + 1, "future_time_features": torch.randn(3, 4, 1)}
    return model, ((), past | future)


for _name, _build in {
    "wav2vec2": _wav2vec2,
    "hubert": _hubert,
    "whisper": _whisper,
    "clip": _clip,
    "patchtst": _patchtst,
    "time_series_transformer": _time_series,
}.items():
    add(f"transformers_{_name}", _build, "transformers")
