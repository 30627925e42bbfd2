"""MaxText's encoders of images and sounds with their projectors (`use_multimodal=true`): names and shapes of its own
modules. Their layers are never stacked."""

from tpuconv.notation.arithmetic import Plus
from tpuconv.targets.target import PartPlaces, Place, Places


def _dense(ours: str, theirs: str) -> Places:
    """Returns the places of a matrix and its bias."""
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("kernel", "bias")}


def _norm(ours: str, theirs: str) -> Places:
    """Returns the places of a layer norm."""
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("scale", "bias")}


def _attention(ours: str, theirs: str) -> Places:
    """Returns the places of attention with biases."""
    names = {"q": "query", "k": "key", "v": "value", "o": "out"}
    return {our: place for x, name in names.items() for our, place in _dense(f"{ours}.{x}", f"{theirs}.{name}").items()}


def _gemma3() -> PartPlaces:
    front, head = "vision_encoder.Gemma3VisionEncoderLayer_0", "vision_encoder.VisionEmbedder_0"
    layer = f"{front}.Transformer.encoderblock_{{L}}"
    return PartPlaces(
        {
            "patch.kernel": Place(f"{front}.embedding.kernel", "(X p q) D -> p q X D"),
            "patch.bias": f"{front}.embedding.bias",
            "positions": Place(f"{front}.pos_embedding", "P D -> 1 P D"),
            **_norm("layers.{L}.attn_norm", f"{layer}.LayerNorm_0"),
            **_norm("layers.{L}.mlp_norm", f"{layer}.LayerNorm_1"),
            **_attention("layers.{L}.attn", f"{layer}.MultiHeadDotProductAttention_0"),
            **_dense("layers.{L}.mlp.up", f"{layer}.MlpBlockViT_0.Dense_0"),
            **_dense("layers.{L}.mlp.down", f"{layer}.MlpBlockViT_0.Dense_1"),
            **_norm("norm", f"{front}.Transformer.encoder_norm"),
            "projector.matrix.kernel": f"{head}.mm_input_projection.w",
            "projector.norm.scale": Place(f"{head}.mm_soft_embedding_norm.scale", arithmetic=Plus(1.0)),
        },
        when=lambda config: not config.vision_use_head,
    )


def _merger(ours: str, theirs: str) -> Places:
    """Returns the places of a projector of Qwen3-VL."""
    return {
        **_norm(f"{ours}.norm", f"{theirs}.ln_q"),
        **_dense(f"{ours}.up", f"{theirs}.mlp_0"),
        **_dense(f"{ours}.down", f"{theirs}.mlp_2"),
    }


def qwen3_images(model: str) -> PartPlaces:
    """Returns the places of the tower of Qwen3-VL, whose modules have names of their own in each model."""
    front, layer = f"vision_encoder.{model}VisionEncoder_0", f"vision_encoder.{model}VisionEncoder_0.blocks_{{L}}"
    return PartPlaces(
        {
            "patch.kernel": Place(f"{front}.patch_embed.proj.kernel", "(X T p q) D -> T p q X D"),
            "patch.bias": f"{front}.patch_embed.proj.bias",
            "positions": f"{front}.pos_embed_interpolate.pos_embed",
            **_norm("layers.{L}.attn_norm", f"{layer}.ln1"),
            **_norm("layers.{L}.mlp_norm", f"{layer}.ln2"),
            **_attention("layers.{L}.attn", f"{layer}.attn.attn"),
            **_dense("layers.{L}.mlp.up", f"{layer}.mlp"),
            **_dense("layers.{L}.mlp.down", f"{layer}.mlp_out"),
            **_merger("deep.{I}", f"{front}.merger_{{I}}"),
            **_merger("projector", f"vision_encoder.{model}VisionProjector_0.merger"),
        },
        is_scannable=lambda config: not config.deepstack,  # which MaxText adds in layers that are apart
    )


GEMMA3_IMAGES = _gemma3()
