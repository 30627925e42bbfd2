"""The schema of a checkpoint's manifest; see `tpuconv.jsonfile.check`."""

from tpuconv.checkpoint.shards import ZSTD
from tpuconv.jsonfile import AtLeast, Each, OneOf, Optional, Range, Size
from tpuconv.sources.headers import DTYPES

NUMBERS = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "float16", "bfloat16", "float32", "float64"),
)
"""Dtypes of stored elements."""

_SUM = AtLeast(0, finite=False)
STATISTICS = {"signal": _SUM, "noise": _SUM, "clipped": _SUM, "count": AtLeast(1)}
"""Statistics of the quantization of a parameter. The sums may be infinite or NaN if such values are allowed."""

_ENCODED = {"qtype": str, "tiles": [Range(1)], "bits": AtLeast(0)}
CALIBRATED_SCHEMA = {"nearest": _SUM, "calibrated": _SUM, "left": Size, "why": str}
"""The result of a calibration: the squared error of the outputs with each weight rounded to nearest and as it is; the
number of matrices left at the nearest values, and the reason."""
_QUANTIZED = {**_ENCODED, "kept": Optional(OneOf()), "rule": Size, "figures": STATISTICS}
_QUANTIZED |= {"calibration": Optional(CALIBRATED_SCHEMA)}
_PASSTHROUGH = {
    **_ENCODED,
    "qtype": OneOf(*NUMBERS, "nf4"),
    "kept": str,
    "stored": [{"dtype": OneOf(*DTYPES), "shape": [Size], "extra": [OneOf(*DTYPES)], "tensor_scale": Optional(bool)}],
    "zero_points": Optional(bool),
}
_NAMED = {"name": str, "summary": str}
QUANTIZATIONS = (
    {
        **_NAMED,
        "rules": [dict],
        "scale_dtype": Optional(str | None),
        "gates": Optional((Each(float), None)),
        "calibration": Optional(dict),
        "calibration_data": Optional({"text": str, "samples": Size, "length": Size, "xxh3_128": str}),
        "parameters": Each((_QUANTIZED, {**_PASSTHROUGH, "rule": Size, "figures": STATISTICS})),
    },
    {
        **_NAMED,
        "rules": Optional(OneOf()),
        "parameters": Each(_PASSTHROUGH),
        "tensor_scales": Optional(Each(float)),
    },
)
"""The schema of parameters that were quantized by rules, which `quantize.config` reads, and of passthrough
parameters."""

CHECKPOINT_SCHEMA = {
    "source": {
        "name": str,
        "repo": str | None,
        "commit": str | None,
        "folder": Optional(str | None),
        "shards": Each({"bytes": Size, "sha256": str | None}),
    },
    "family": str,
    "variant": Optional(str),
    "release": Optional(
        {
            "spelling": Optional(Each(str)),
            "apart": Optional(Each(Each([Size]))),
            "forms": Optional(Each((str, Each([Size])))),
        }
    ),
    "returns": Optional(OneOf("scores", "scores of tokens", "hidden states", "drafts")),
    "parts": Optional([OneOf("vision", "video", "audio")]),
    "options": {
        "dtype": str,
        "scan_layers": bool,
        "layers": ([Size], None),
        "include_mtp": Optional(bool),
        "encoding": Optional(str),
        "compress": Optional(bool),
        "allow_config": Optional([str]),
        "target": Optional(str),
        "pathways": Optional(bool),
        "adapters": Optional([{"name": Optional(str), "weight": float, "xxh3_128": str}]),
    },
    "folder": Optional(str),
    "versions": Each(str),
    "parameters": Size,
    "bytes": Size,
    "stored_bytes": Optional(Size),
    "skipped": [{"pattern": str, "count": Size, "reason": str}],
    "arrays": Each(
        {
            "shape": [Size],
            "dtype": OneOf(*NUMBERS),
            "axes": str,
            "chunks": [Size],
            "shards": Optional([Size]),
            "sources": [str],
            "xxh3": str,
            "crc32c": Optional(str),
            "compression": Optional(OneOf(ZSTD)),
            "shard_bytes": Optional([Size]),
            "buffer": Optional(bool),
        }
    ),
    "quantization": Optional(QUANTIZATIONS),
}
"""The schema of a checkpoint's manifest."""
