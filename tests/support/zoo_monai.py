"""MONAI: networks for medical images, in two and three dimensions."""

from __future__ import annotations

import functools
from typing import Any

from catalogue import Built, add, images

LEVELS = {"channels": (8, 16, 32), "strides": (2, 2)}

# name -> class, options, shape of the images (channels, size, dimensions)
NETWORKS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "UNet": (
        "UNet",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "num_res_units": 1, "dropout": 0.1} | LEVELS,
        (1, 16, 2),
    ),
    "UNet_3d": (
        "UNet",
        {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "num_res_units": 2, "dropout": 0.1} | LEVELS,
        (1, 8, 3),
    ),
    "BasicUNet": (
        "BasicUNet",
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "features": (8, 8, 16, 16, 32, 8),
            "dropout": 0.1,
        },
        (1, 32, 2),
    ),
    "AttentionUnet": (
        "AttentionUnet",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "dropout": 0.1} | LEVELS,
        (1, 16, 2),
    ),
    "VNet": ("VNet", {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}, (1, 16, 3)),
    "VNet_2d": ("VNet", {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, (1, 32, 2)),
    "SegResNet": (
        "SegResNet",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "init_filters": 8, "dropout_prob": 0.2},
        (1, 32, 2),
    ),
    "UNETR": (
        "UNETR",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "img_size": 32, "feature_size": 8}
        | {"hidden_size": 32, "mlp_dim": 64, "num_heads": 4, "dropout_rate": 0.1},
        (1, 32, 2),
    ),
    "SwinUNETR": (
        "SwinUNETR",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "depths": (2, 2, 2, 2), "feature_size": 12}
        | {"num_heads": (2, 2, 2, 2), "drop_rate": 0.1, "attn_drop_rate": 0.1, "dropout_path_rate": 0.1},
        (1, 64, 2),
    ),
    "DenseNet121": (
        "DenseNet",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 4, "init_features": 16, "growth_rate": 8}
        | {"block_config": (2, 2, 2, 2), "dropout_prob": 0.1},
        (1, 64, 2),
    ),
    "ViT": (
        "ViT",
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "img_size": 32,
            "patch_size": 8,
            "hidden_size": 32,
            "mlp_dim": 64,
        }
        | {"num_layers": 2, "num_heads": 4, "classification": True, "num_classes": 4, "dropout_rate": 0.1},
        (1, 32, 2),
    ),
    "EfficientNetBN": (
        "EfficientNetBN",
        {"model_name": "efficientnet-b0", "pretrained": False, "spatial_dims": 2, "in_channels": 1}
        | {"num_classes": 4},
        (1, 32, 2),
    ),
    "HighResNet": (
        "HighResNet",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "dropout_prob": 0.1},
        (1, 16, 2),
    ),
    "FullyConnectedNet": (
        "FullyConnectedNet",
        {"in_channels": 12, "out_channels": 3, "hidden_channels": [24, 24], "dropout": 0.2},
        (12, 0, 0),
    ),
}


def _build(kind: str, options: dict[str, Any], shape: tuple[int, int, int]) -> Built:
    from monai.networks import nets

    channels, size, dims = shape
    return getattr(nets, kind)(**options), images(2, channels, size, dims)


for _name, _arguments in NETWORKS.items():
    add(f"monai_{_name}", functools.partial(_build, *_arguments), "monai")
