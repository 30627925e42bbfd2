"""Plain Flax NNX: our own tree as `nnx.state(model)` has it, in which every leaf is the value of a variable."""

from tpuconv.targets.target import OWN_PARTS, Target

NNX = Target(
    name="nnx",
    summary="plain Flax NNX: StandardCheckpointer().restore into nnx.state(model)",
    loading="StandardCheckpointer().restore(OUT/params, nnx.state(model))",
    leaf=".value",
    layer_axis=0,
    quantized=OWN_PARTS,
)
