"""timm: image classifiers, made small by options."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from catalogue import Built, add, images, settle

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
VIT_NOISE = VIT | {"proj_drop_rate": 0.1, "attn_drop_rate": 0.1}
STAGES = {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1)}
MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}

# name -> image size and options beside dropout before the head and stochastic depth
NETWORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (32, VIT_NOISE),
    "deit_tiny_distilled_patch16_224": (32, VIT_NOISE),
    "cait_xxs24_224": (32, VIT | {"proj_drop_rate": 0.1}),
    "xcit_nano_12_p8_224": (32, VIT | {"proj_drop_rate": 0.1}),
    "beit_base_patch16_224": (32, VIT_NOISE),
    "eva02_tiny_patch14_224": (32, VIT_NOISE),
    "swin_tiny_patch4_window7_224": (
        32,
        {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4)}
        | {"window_size": 4, "attn_drop_rate": 0.1, "proj_drop_rate": 0.1},
    ),
    "convnext_atto": (32, STAGES),
    "convnextv2_atto": (32, STAGES),
    "edgenext_xx_small": (32, STAGES),
    "pvt_v2_b0": (32, {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 1, 2, 4)}),
    "coatnet_pico_rw_224": (64, {"img_size": 64}),
    "resnet18": (32, {}),
    "resnetv2_50": (32, {"layers": (1, 1, 1, 1), "channels": (16, 32, 32, 32)}),
    "seresnet18": (32, {}),
    "regnety_002": (32, {}),
    "efficientnet_b0": (32, {}),
    "mobilenetv3_small_100": (32, {}),
    "nfnet_l0": (32, {}),
}

# module, class and options of networks whose registered names fix their sizes
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixer": ("mlp_mixer", "MlpMixer", MIXER | {"proj_drop_rate": 0.1}),
    "resmlp": ("mlp_mixer", "MlpMixer", MIXER | {"mlp_ratio": 4, "proj_drop_rate": 0.1}),
    "gmlp": ("mlp_mixer", "MlpMixer", MIXER | {"mlp_ratio": 6, "proj_drop_rate": 0.1}),
    "poolformer": ("metaformer", "MetaFormer", STAGES),
    "caformer": ("metaformer", "MetaFormer", {"dims": (32,) * 4, "depths": (1,) * 4, "proj_drop_rate": 0.1}),
}
NOISE = {"num_classes": 5, "drop_rate": 0.1, "drop_path_rate": 0.1}


def _build(name: str, size: int, options: dict[str, Any]) -> Built:
    import timm

    model = timm.create_model(name, pretrained=False, **NOISE, **options)
    x = images(2, size=size)
    # with the statistics of random weights efficientnets are chaotic: small changes grow with every layer
    return model if name.startswith("efficientnet") else settle(model, x), x


def _build_class(name: str, module: str, kind: str, options: dict[str, Any]) -> Built:
    from timm.models import metaformer, mlp_mixer

    models = {"mlp_mixer": mlp_mixer, "metaformer": metaformer}[module]
    parts: dict[str, dict[str, Any]] = {
        "resmlp": {"block_layer": mlp_mixer.ResBlock, "norm_layer": mlp_mixer.Affine},
        "gmlp": {"block_layer": mlp_mixer.SpatialGatingBlock, "mlp_layer": mlp_mixer.GatedMlp},
        "poolformer": {"token_mixers": metaformer.Pooling, "norm_layers": metaformer.GroupNorm1},
        "caformer": {
            "token_mixers": [metaformer.SepConv] * 2 + [metaformer.Attention] * 2,
            "norm_layers": [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2,
        },
    }
    model = getattr(models, kind)(**NOISE, **options, **parts.get(name, {}))
    if module == "mlp_mixer":
        nn.init.normal_(model.head.weight)  # starts at zero: nothing would reach the outputs
    return model, images(2, size=32)


for _name, (_size, _options) in NETWORKS.items():
    add(f"timm_{_name}", functools.partial(_build, _name, _size, _options), "timm")
for _name, _arguments in CLASSES.items():
    add(f"timm_{_name}", functools.partial(_build_class, _name, *_arguments), "timm")
