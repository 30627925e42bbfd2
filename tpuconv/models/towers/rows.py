"""Rows that the tables of towers share, in letters of their own (`tpuconv.models.common.beside`)."""

from tpuconv.notation.table import Map, under


def with_bias(name: str, param: str, layout: str, bias: str, when: str | None = None) -> tuple[Map, Map]:
    """Returns the rows of a matrix and its bias, which is there under a condition if one is given; see `Map`."""
    return Map(f"{name}.weight", f"{param}.kernel", layout), Map(f"{name}.bias", f"{param}.bias", bias, when=when)


def without_bias(name: str, param: str, layout: str) -> tuple[Map]:
    """Returns the row of a matrix without a bias."""
    return (Map(f"{name}.weight", f"{param}.kernel", layout),)


def layer_norm(name: str, param: str, axes: str = "D") -> tuple[Map, Map]:
    """Returns the rows of a layer norm."""
    return Map(f"{name}.weight", f"{param}.scale", axes), Map(f"{name}.bias", f"{param}.bias", axes)


def rms_norm(name: str, param: str, axes: str = "D") -> tuple[Map]:
    """Returns the row of an RMS norm."""
    return (Map(f"{name}.weight", f"{param}.scale", axes),)


IN_HEADS, IN_KV_HEADS, OUT_OF_HEADS = "(N H) D -> D N H", "(K H) D -> D K H", "D (N H) -> N H D"
"""Matrices to and from heads."""

UP, DOWN = "F D -> D F", "D F -> F D"
"""The matrices of an MLP."""

PATCH_MATRIX = "D X p q -> (X p q) D"
"""The kernel of a convolution whose stride is its size: a matrix of the patches."""

CLIP_LAYERS = under(
    "encoder.layers.{L}",
    "layers.{L}",
    *layer_norm("layer_norm1", "attn_norm"),
    *layer_norm("layer_norm2", "mlp_norm"),
    *(row for x in "qkv" for row in with_bias(f"self_attn.{x}_proj", f"attn.{x}", IN_HEADS, "(N H) -> N H")),
    *with_bias("self_attn.out_proj", "attn.o", OUT_OF_HEADS, "D"),
    *with_bias("mlp.fc1", "mlp.up", UP, "F"),
    *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
)
"""The layers of CLIP and SigLIP."""


BIASED_MATRIX = "tpuconv.models.towers.encoder:OneMatrix"
"""The module of a projector that is one matrix with a bias."""


def joined_heads(name: str, front: str, heads: str = "N H", width: str = "D") -> tuple[Map, ...]:
    """Returns the rows of PyTorch's MultiheadAttention, which has queries, keys and values in one matrix; `front` is
    what stands before their parameters, `heads` are the letters of heads and of one head."""
    joined, each = " + ".join([f"({heads})"] * 3), f"{width} {heads}"
    kernels, biases = (tuple(f"{front}{x}.{kind}" for x in "qkv") for kind in ("kernel", "bias"))
    return (
        Map(f"{name}.in_proj_weight", kernels, f"({joined}) {width} -> {each}, {each}, {each}"),
        Map(f"{name}.in_proj_bias", biases, f"({joined}) -> {heads}, {heads}, {heads}"),
        *with_bias(f"{name}.out_proj", f"{front}o", f"{width} ({heads}) -> {heads} {width}", width),
    )
