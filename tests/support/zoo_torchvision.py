"""torchvision: classification and segmentation networks."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from catalogue import Built, add, images, settle

# name -> image size and options; the published sizes are kept where no option makes the network smaller
CLASSIFIERS: dict[str, tuple[int, dict[str, Any]]] = {
    "alexnet": (64, {"dropout": 0.1}),
    "vgg11_bn": (32, {"dropout": 0.1}),
    "googlenet": (64, {"dropout": 0.2, "dropout_aux": 0.7, "aux_logits": True, "init_weights": True}),
    "inception_v3": (96, {"dropout": 0.2, "aux_logits": True, "init_weights": False}),
    "squeezenet1_1": (64, {"dropout": 0.2}),
    "mobilenet_v2": (32, {"dropout": 0.2}),
    "mobilenet_v3_small": (32, {"dropout": 0.2}),
    "efficientnet_b0": (32, {"dropout": 0.2}),
    "efficientnet_v2_s": (32, {"dropout": 0.2}),
    "mnasnet0_5": (32, {"dropout": 0.2}),
    "densenet121": (32, {"drop_rate": 0.1}),
    "convnext_tiny": (32, {"stochastic_depth_prob": 0.1}),
}


def _classifier(name: str, size: int, options: dict[str, Any]) -> Built:
    from torchvision import models

    model, x = getattr(models, name)(num_classes=5, **options), images(2, size=size)
    for parameter, value in model.named_parameters():
        if parameter.endswith("layer_scale"):  # starts at 1e-6: the noise would drown in rounding errors
            nn.init.constant_(value, 0.1)
    # with the statistics of random weights efficientnets are chaotic: small changes grow with every layer
    return model if name.startswith("efficientnet") else settle(model, x), x


for _name, (_size, _options) in CLASSIFIERS.items():
    add(f"torchvision_{_name}", functools.partial(_classifier, _name, _size, _options), "torchvision")


def _swin(second: bool) -> Built:
    from torchvision.models import swin_transformer as swin

    sizes = {
        "patch_size": [4, 4],
        "embed_dim": 24,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": [4, 4],
    }
    parts = {
        "block": swin.SwinTransformerBlockV2 if second else swin.SwinTransformerBlock,
        "downsample_layer": swin.PatchMergingV2 if second else swin.PatchMerging,
    }
    noise = {"dropout": 0.1, "attention_dropout": 0.1, "num_classes": 5}
    return swin.SwinTransformer(**sizes, **parts, **noise), images(2)


def _vit() -> Built:
    from torchvision.models import VisionTransformer

    shape = {
        "image_size": 32,
        "patch_size": 8,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 32,
        "mlp_dim": 64,
    }
    model = VisionTransformer(**shape, dropout=0.1, attention_dropout=0.1, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # starts at zero: nothing would reach the outputs
    return model, images(size=32)


def _maxvit() -> Built:
    from torchvision.models import MaxVit

    shape = {"input_size": (32, 32), "stem_channels": 16, "partition_size": 4, "block_channels": [16, 32]}
    layers = {"block_layers": [1, 1], "head_dim": 8, "stochastic_depth_prob": 0.2}
    noise = {"mlp_dropout": 0.1, "attention_dropout": 0.1, "num_classes": 5}
    return MaxVit(**shape, **layers, **noise), images(2, size=32)


def _segmenter(name: str) -> Built:
    from torchvision.models import segmentation

    options: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": 2}
    if name != "lraspp_mobilenet_v3_large":
        options["aux_loss"] = True
    model, x = getattr(segmentation, name)(**options), images(2, size=32)
    return settle(model, x), x


def _lraspp() -> Built:
    """The network has no dropout of its own: some before its classifier, as users add."""
    model, inputs = _segmenter("lraspp_mobilenet_v3_large")
    model.classifier.cbr.append(nn.Dropout2d(0.1))
    return model, inputs


def _regnet() -> Built:
    """No dropout of its own: some before the last layer, as users add."""
    from torchvision import models

    model = models.regnet_y_400mf(num_classes=5)
    model.fc = nn.Sequential(nn.Dropout(0.2), model.fc)
    return model, images(2, size=32)


def _resnet_dropout_everywhere() -> Built:
    """ResNet-18 with dropout behind every stage, as users add."""
    from torchvision import models

    model = models.resnet18(num_classes=5)
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        stage.append(nn.Dropout(0.1))
    return model, images(2, size=32)


add("torchvision_swin_t", functools.partial(_swin, False), "torchvision")
add("torchvision_swin_v2_t", functools.partial(_swin, True), "torchvision")
add("torchvision_vit", _vit, "torchvision")
add("torchvision_maxvit", _maxvit, "torchvision")
add("torchvision_fcn_resnet50", functools.partial(_segmenter, "fcn_resnet50"), "torchvision")
add("torchvision_deeplabv3", functools.partial(_segmenter, "deeplabv3_mobilenet_v3_large"), "torchvision")
add("torchvision_lraspp", _lraspp, "torchvision")
add("torchvision_regnet", _regnet, "torchvision")
add("torchvision_resnet18_dropout", _resnet_dropout_everywhere, "torchvision")
