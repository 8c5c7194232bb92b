"""Small networks, one for every mechanism, whose moments are on record.

`NETWORKS[name]()` gives (model, inputs, keywords of convert). Weights come from a seed of the network's own.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp

Case = tuple[nn.Module, Any, dict[str, Any]]
NETWORKS: dict[str, Callable[[], Case]] = {}


class Function(nn.Module):
    """A network as a function of its parts and its input."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.parts, *inputs)


def add(name: str, make: Callable[[], nn.Module], *shape: int, inputs: Any = None, **options: Any) -> None:
    """A network by name; its input is drawn in this shape, or made by `inputs`."""

    def build() -> Case:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(name.encode()))
            model = make().double().eval()
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    nn.init.normal_(module.weight)
                    nn.init.normal_(module.bias)
                    nn.init.normal_(module.running_mean)
                    nn.init.uniform_(module.running_var, 0.5, 2.0)
            given = torch.randn(2, *shape, dtype=torch.float64) if inputs is None else inputs()
        return model, given, options

    assert name not in NETWORKS, name
    NETWORKS[name] = build


def dense(*middle: nn.Module, p: float = 0.3, n: int = 6, k: int = 3) -> nn.Sequential:
    """A hidden layer, dropout, what is tested, and a layer of three outputs."""
    return nn.Sequential(nn.Linear(n, 8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 8), *middle, nn.Linear(8, k))


# Dense layers and activations.

for _kind in (
    nn.ReLU,
    nn.Tanh,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.Hardswish,
    nn.Softplus,
    nn.LeakyReLU,
    nn.Softshrink,
    nn.Mish,
):
    add(f"dense_{_kind.__name__.lower()}", lambda kind=_kind: dense(kind()), 6)
add(
    "dropout_on_input_pairs",
    lambda: nn.Sequential(nn.Dropout(0.05), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)),
    8,
)
add(
    "dropout_on_input_cases",
    lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 2)),
    10,
)
add(
    "rare_dropout_twice",
    lambda: nn.Sequential(
        nn.Dropout(0.1),
        nn.Linear(6, 7),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(7, 5),
        nn.GELU(),
        nn.Linear(5, 2),
    ),
    6,
)
add(
    "deep_dense",
    lambda: nn.Sequential(
        *[m for _ in range(8) for m in (nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.1))], nn.Linear(6, 2)
    ),
    6,
)
add(
    "batch_norm_dense",
    lambda: dense(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)),
    6,
)
for _name, _make in {
    "softmax": lambda: nn.Softmax(-1),
    "log_softmax": lambda: nn.LogSoftmax(-1),
    "layer_norm": lambda: nn.LayerNorm(8),
    "rms_norm": lambda: nn.RMSNorm(8),
}.items():
    add(
        f"dropout_before_{_name}",
        lambda make=_make: nn.Sequential(
            nn.Linear(6, 8),
            nn.Dropout(0.3),
            make(),
            nn.Linear(8, 8),
            nn.Dropout(0.1),
            make(),
            nn.Linear(8, 3),
        ),
        6,
    )
add(
    "channel_dropout_before_instance_norm",
    lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.Dropout2d(0.3),
        nn.InstanceNorm2d(3, affine=True),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 3),
    ),
    2,
    6,
    6,
)
add("softmax_head", lambda: nn.Sequential(dense(nn.ReLU()), nn.Softmax(-1)), 6)
add("log_softmax_head", lambda: nn.Sequential(dense(nn.ReLU()), nn.LogSoftmax(-1)), 6)
add("sigmoid_head", lambda: nn.Sequential(dense(nn.ReLU()), nn.Sigmoid()), 6)
add("softmax_of_two", lambda: nn.Sequential(dense(nn.ReLU(), k=2), nn.Softmax(-1)), 6)
add("alpha_dropout", lambda: dense(nn.SELU(), nn.AlphaDropout(0.2)), 6)
add("layer_norm", lambda: dense(nn.LayerNorm(8), nn.GELU()), 6)
add("rms_norm", lambda: dense(nn.RMSNorm(8), nn.GELU()), 6)
add("most_likely_outputs", lambda: dense(nn.ReLU(), k=9), 6, outputs=3)
add("chosen_outputs", lambda: dense(nn.ReLU(), k=9), 6, outputs=[7, 1])
add("jumps", lambda: dense(nn.ReLU(), p=0.1), 6, jumps=4)
add(
    "uncertain_input",
    lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
    inputs=lambda: mp.Moments(torch.randn(2, 6, dtype=torch.float64), 0.2),
)
add(
    "uncertain_input_and_dropout",
    lambda: dense(nn.Tanh()),
    inputs=lambda: mp.Moments(torch.randn(2, 6, dtype=torch.float64), 0.2),
)
add(
    "drop_connect",
    lambda: Function(
        lambda a, b, x: F.linear(
            F.relu(F.linear(x, F.dropout(a.weight, 0.2, True), a.bias)), b.weight, b.bias
        ),
        nn.Linear(6, 8),
        nn.Linear(8, 3),
    ),
    6,
)

# Functions of dropped values.

add("dropped_gelu", lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 3)), 6)
add("dropped_tanh_of_random", lambda: dense(nn.Dropout(0.2), nn.Tanh()), 6)
add(
    "dropped_channels",
    lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.Dropout2d(0.2),
        nn.BatchNorm2d(4),
        nn.SiLU(),
        nn.Conv2d(4, 2, 3),
        nn.AlphaDropout(0.2),
        nn.ELU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
    *(2, 6, 6),
)
add(
    "dropped_twice_used",
    lambda: Function(
        lambda a, drop, b, c, x: b(F.glu(d := drop(h := a(x)))) + c(h + d.relu()),
        nn.Linear(6, 8),
        nn.Dropout(0.3),
        nn.Linear(4, 3),
        nn.Linear(8, 3),
    ),
    6,
)

# Branches, products, extremes, quotients.


def branches(join: Callable[[Tensor, Tensor], Tensor], width: int = 8) -> nn.Module:
    def run(
        first: nn.Module, drop: nn.Module, a: nn.Module, b: nn.Module, last: nn.Module, x: Tensor
    ) -> Tensor:
        h = drop(F.relu(first(x)))
        return last(join(a(h), b(h)))

    return Function(
        run, nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(width, 3)
    )


add("sum_of_branches", lambda: branches(lambda a, b: a + 0.5 * b.relu()), 6)
add("product_of_branches", lambda: branches(lambda a, b: a * b), 6)
add("gate", lambda: branches(lambda a, b: a * b.sigmoid()), 6)
add("square_by_hand", lambda: branches(lambda a, b: a * a - b), 6)
add("maximum_of_branches", lambda: branches(torch.maximum), 6)
add("minimum_of_branches", lambda: branches(torch.minimum), 6)
add("quotient", lambda: branches(lambda a, b: a / (b.exp() + 0.5)), 6)
add("concatenation", lambda: branches(lambda a, b: torch.cat([a, b.tanh()], -1), 16), 6)
add("stack_and_mean", lambda: branches(lambda a, b: torch.stack([a, b.relu()], 1).mean(1)), 6)
add("maximum_over_tokens", lambda: branches(lambda a, b: torch.stack([a, b, a - b], 1).amax(1)), 6)
add("log_sum_exp", lambda: branches(lambda a, b: torch.stack([a, b], 1).logsumexp(1)), 6)
add("spread", lambda: branches(lambda a, b: torch.stack([a, b, a + b], 1).std(1) + a.var(1, keepdim=True)), 6)
add("running_sum", lambda: branches(lambda a, b: a.cumsum(-1) + b.flip(-1)), 6)
add("where", lambda: branches(lambda a, b: torch.where(torch.arange(8) > 3, a, b).clamp(-1, 1)), 6)
add("scatter", lambda: branches(lambda a, b: a.index_add(1, torch.tensor([0, 3]), b[:, :2]).roll(1, 1)), 6)
add("two_outputs", lambda: Function(lambda m, x: (m(x), m(x).mean(-1)), dense(nn.ReLU())), 6)
add(
    "shared_layer",
    lambda: Function(lambda m, d, x: m(d(m(d(m(x).relu())).relu())), nn.Linear(6, 6), nn.Dropout(0.2)),
    6,
)
add(
    "gaussian_noise",
    lambda: Function(
        lambda a, b, x: b((y := a(x)) * (1 + 0.3 * torch.randn_like(y))), nn.Linear(6, 8), nn.Linear(8, 3)
    ),
    6,
)
add(
    "stochastic_depth",
    lambda: Function(
        lambda a, b, c, d, x: d(
            (y := a(x))
            + c(b(y)).relu() * torch.bernoulli(torch.empty(y.shape[0], 1, dtype=y.dtype), 0.8) / 0.8
        ),
        nn.Linear(6, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.Linear(8, 3),
    ),
    6,
)
for _way in ("linearize", "sample"):
    add(
        f"unsupported_{_way}",
        lambda: branches(lambda a, b: torch.special.i0(a) + b.sort(-1).values),
        6,
        unsupported=_way,
    )

# Convolutions and pooling.


def images(*layers: nn.Module, channels: int = 4, size: int = 6, k: int = 3) -> nn.Sequential:
    with torch.no_grad():
        features = math.prod(nn.Sequential(*layers).eval()(torch.zeros(1, channels, size, size)).shape)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, k))


def conv(a: int, b: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(a, b, kernel, **{"padding": kernel // 2, **options})


add(
    "paper_cnn",
    lambda: nn.Sequential(
        nn.Dropout(0.3),
        conv(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        conv(4, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(8, 3),
    ),
    2,
    8,
    8,
)
add(
    "batch_norm_cnn",
    lambda: images(
        conv(2, 4),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        conv(4, 4),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        channels=2,
    ),
    2,
    6,
    6,
)
add(
    "dropout_before_pooling",
    lambda: images(
        conv(2, 4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.MaxPool2d(2),
        conv(4, 4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.MaxPool2d(3),
        channels=2,
    ),
    2,
    6,
    6,
)
add(
    "channel_dropout",
    lambda: images(
        conv(2, 4), nn.ReLU(), nn.Dropout2d(0.3), conv(4, 4), nn.ReLU(), nn.AvgPool2d(2), channels=2
    ),
    2,
    6,
    6,
)
add(
    "channel_dropout_wide_kernel",
    lambda: images(nn.Dropout2d(0.3), conv(4, 4, 5, stride=2), nn.Tanh(), nn.AdaptiveAvgPool2d(1)),
    4,
    6,
    6,
)
add("channel_dropout_flattened", lambda: images(conv(2, 4), nn.Dropout2d(0.3), channels=2), 2, 6, 6)
add(
    "strides_groups_dilation",
    lambda: images(
        nn.Dropout(0.3),
        conv(4, 8, groups=2, dilation=2, padding=2),
        nn.ReLU(),
        conv(8, 4, stride=2),
        nn.ReLU(),
    ),
    4,
    6,
    6,
)
add(
    "overlapping_pooling",
    lambda: images(nn.Dropout(0.3), conv(4, 4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
    4,
    6,
    6,
)
add(
    "pooling_ceil",
    lambda: images(nn.Dropout(0.3), conv(4, 4), nn.MaxPool2d(2, ceil_mode=True), size=5),
    4,
    5,
    5,
)
add(
    "pooling_1d",
    lambda: nn.Sequential(
        nn.Dropout(0.3), nn.Conv1d(3, 4, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 3)
    ),
    3,
    8,
)
add(
    "volumes",
    lambda: nn.Sequential(
        nn.Dropout3d(0.3),
        nn.Conv3d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Flatten(),
        nn.Linear(24, 2),
    ),
    2,
    4,
    4,
    4,
)
add(
    "transposed_convolution",
    lambda: images(
        conv(2, 4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.ConvTranspose2d(4, 2, 2, 2),
        nn.ReLU(),
        nn.AvgPool2d(4),
        channels=2,
    ),
    2,
    6,
    6,
)
add(
    "bilinear",
    lambda: Function(
        lambda d, a, x: F.interpolate(a(d(x)).relu(), size=(3, 4), mode="bilinear").flatten(1)[:, :7],
        nn.Dropout(0.3),
        conv(2, 2),
    ),
    2,
    6,
    6,
)
add("group_norm", lambda: images(nn.Dropout(0.3), conv(4, 4), nn.GroupNorm(2, 4), nn.ReLU()), 4, 6, 6)
add(
    "instance_norm",
    lambda: images(nn.Dropout(0.3), conv(4, 4), nn.InstanceNorm2d(4, affine=True), nn.ReLU()),
    4,
    6,
    6,
)
add(
    "residual_cnn",
    lambda: Function(
        lambda a, b, c, d, e, x: e((a(x).relu() + c(d(b(d(a(x).relu())).relu()))).relu().mean((2, 3))),
        conv(2, 4),
        conv(4, 4),
        conv(4, 4),
        nn.Dropout(0.3),
        nn.Linear(4, 3),
    ),
    2,
    6,
    6,
)
add(
    "deep_cnn",
    lambda: images(
        *[m for i in range(5) for m in (conv(2 if i == 0 else 4, 4), nn.ReLU(), nn.Dropout(0.1))],
        nn.MaxPool2d(2),
        channels=2,
    ),
    2,
    6,
    6,
)
add(
    "unpooling",
    lambda: Function(
        lambda a, d, b, x: b(
            F.max_unpool2d(
                d(a(x)), F.max_pool2d(x[:, :1].expand(-1, 4, -1, -1), 2, return_indices=True)[1], 2
            ).flatten(1)
        ),
        conv(2, 4, 2, stride=2, padding=0),
        nn.Dropout(0.3),
        nn.Linear(144, 3),
    ),
    2,
    6,
    6,
)
add("per_pixel", lambda: nn.Sequential(conv(2, 4), nn.ReLU(), nn.Dropout2d(0.3), conv(4, 2)), 2, 4, 4)

# Sequences and attention.

add(
    "lstm",
    lambda: Function(
        lambda m, h, x: h(m(x)[0][:, -1]), nn.LSTM(3, 4, 2, batch_first=True, dropout=0.3), nn.Linear(4, 2)
    ),
    3,
    3,
)
add(
    "gru_first",
    lambda: Function(lambda d, m, h, x: h(m(d(x))[1][0]), nn.Dropout(0.3), nn.GRU(3, 4), nn.Linear(4, 2)),
    inputs=lambda: torch.randn(3, 2, 3, dtype=torch.float64),
)
add(
    "rnn_tagger",
    lambda: Function(
        lambda m, h, x: h(m(x)[0]), nn.RNN(3, 4, 2, batch_first=True, dropout=0.3), nn.Linear(4, 2)
    ),
    3,
    3,
)
add(
    "attention_by_hand",
    lambda: Function(
        lambda q, k, v, d, h, x: h((torch.softmax(q(y := d(x)) @ k(y).mT / 2, -1) @ v(y)).mean(1)),
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        nn.Dropout(0.2),
        nn.Linear(4, 2),
    ),
    5,
    4,
)
add(
    "dropped_attention_weights",
    lambda: Function(
        lambda q, k, v, d, h, x: h((d(torch.softmax(q(x) @ k(x).mT / 2, -1)) @ v(x)).mean(1)),
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        nn.Dropout(0.2),
        nn.Linear(4, 2),
    ),
    5,
    4,
)
add(
    "encoder_layer",
    lambda: Function(
        lambda e, h, x: h(e(x).mean(1)),
        nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True),
        nn.Linear(4, 2),
    ),
    5,
    4,
)
add(
    "dropped_table",
    lambda: Function(
        lambda e, d, a, h, x: h(a(x + d(e.weight)).relu().mean(1)),
        nn.Embedding(5, 4),
        nn.Dropout(0.2),
        nn.Linear(4, 6),
        nn.Linear(6, 2),
    ),
    5,
    4,
)
add(
    "tokens",
    lambda: Function(
        lambda e, d, a, h, x: h(a(d(e(x))).relu().mean(1)),
        nn.Embedding(7, 4),
        nn.Dropout(0.2),
        nn.Linear(4, 6),
        nn.Linear(6, 2),
    ),
    inputs=lambda: torch.tensor([[1, 2, 3], [4, 5, 6]]),
)
