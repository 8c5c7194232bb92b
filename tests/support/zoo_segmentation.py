"""segmentation_models_pytorch: decoders on a small encoder, with a classification head for few outputs."""

from __future__ import annotations

import functools
from typing import Any

from catalogue import Built, add, images

# name -> options
NETWORKS: dict[str, dict[str, Any]] = {
    "Unet": {"decoder_channels": (32, 16, 16, 8, 8)},
    "UnetPlusPlus": {"decoder_channels": (32, 16, 16, 8, 8)},
    "MAnet": {"decoder_channels": (32, 16, 16, 8, 8)},
    "Linknet": {},
    "FPN": {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 32, "decoder_dropout": 0.2},
    "PSPNet": {"psp_out_channels": 32, "psp_dropout": 0.2},
    "PAN": {"decoder_channels": 16},
    "DeepLabV3": {"decoder_channels": 32},
    "DeepLabV3Plus": {"decoder_channels": 32},
    "UPerNet": {"decoder_channels": 32},
    "Segformer": {"decoder_segmentation_channels": 32},
}
WITH_OWN_DROPOUT = ("FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus")


def _build(name: str, options: dict[str, Any]) -> Built:
    """Networks without dropout of their own get some behind every stage of the encoder, as users add."""
    import segmentation_models_pytorch as smp
    from torch import nn

    model = getattr(smp, name)("resnet18", encoder_weights=None, classes=1, **options)
    if name not in WITH_OWN_DROPOUT:
        for stage in (model.encoder.layer2, model.encoder.layer3, model.encoder.layer4):
            stage.append(nn.Dropout2d(0.1))
    return model, images(2, size=128 if name == "PAN" else 64)


for _name, _options in NETWORKS.items():
    add(f"smp_{_name}", functools.partial(_build, _name, _options), "segmentation_models_pytorch")


def _classified() -> Built:
    """The auxiliary classifier alone: few outputs."""
    import segmentation_models_pytorch as smp

    aux = {"pooling": "avg", "dropout": 0.3, "classes": 4}
    model = smp.Unet("resnet18", encoder_weights=None, classes=1, aux_params=aux)
    return model, images(2, size=32)


add("smp_Unet_auxiliary_classifier", _classified, "segmentation_models_pytorch")
