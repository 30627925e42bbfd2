"""MaxText's encoders of images and sounds with their projectors: names and shapes of its own modules. Their layers are
never stacked."""

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

_GEMMA4, _GEMMA4_LAYER = (
    "vision_encoder.Gemma4VisionEncoderLayer_0",
    "vision_encoder.Gemma4VisionEncoderLayer_0.layer_{L}",
)
GEMMA4_IMAGES = PartPlaces(
    {
        "patch.kernel": f"{_GEMMA4}.vision_entry.input_projection.kernel",
        "positions": Place(f"{_GEMMA4}.vision_entry.pos_emb_param", "A P D -> P A D"),
        "layers.{L}.attn_norm.scale": f"{_GEMMA4_LAYER}.pre_attention_norm.scale",
        "layers.{L}.post_attn_norm.scale": f"{_GEMMA4_LAYER}.post_attention_norm.scale",
        "layers.{L}.mlp_norm.scale": f"{_GEMMA4_LAYER}.pre_ffw_norm.scale",
        "layers.{L}.post_mlp_norm.scale": f"{_GEMMA4_LAYER}.post_ffw_norm.scale",
        **_attention("layers.{L}.attn", f"{_GEMMA4_LAYER}.attention"),
        "layers.{L}.attn.q_norm.scale": f"{_GEMMA4_LAYER}.attention.query_norm.scale",
        "layers.{L}.attn.k_norm.scale": f"{_GEMMA4_LAYER}.attention.key_norm.scale",
        "layers.{L}.mlp.gate.kernel": f"{_GEMMA4_LAYER}.mlp.wi_0.kernel",
        "layers.{L}.mlp.up.kernel": f"{_GEMMA4_LAYER}.mlp.wi_1.kernel",
        "layers.{L}.mlp.down.kernel": f"{_GEMMA4_LAYER}.mlp.wo.kernel",
        "std_bias": f"{_GEMMA4}.std_bias",
        "std_scale": f"{_GEMMA4}.std_scale",
        "projector.matrix.kernel": "vision_encoder.Gemma4VisionProjector_0.projection.kernel",
    },
    # MaxText has the encoder of the 26B and 31B models: it always standardizes, and has no limits and no fewer keys.
    when=lambda config: (
        config.standardize
        and not config.use_clipped_linears
        and config.num_key_value_heads == config.num_attention_heads
    ),
)

_LLAMA4, _LLAMA4_LAYER = (
    "vision_encoder.Llama4VisionModel_0",
    "vision_encoder.Llama4VisionModel_0.Llama4VisionEncoder_0.layers_{L}",
)
_SHUFFLED = f"{_LLAMA4}.Llama4VisionPixelShuffleMLP_0.pixel_shuffle_mlp.vit_pixel_shuffle_mlp"
LLAMA4_IMAGES = PartPlaces(
    {
        "patch.kernel": f"{_LLAMA4}.Llama4UnfoldConvolution_0.vit_unfold_linear.kernel",
        "class_token": f"{_LLAMA4}.class_embedding",
        "positions": f"{_LLAMA4}.positional_embedding_vlm",
        **_norm("norm_before", f"{_LLAMA4}.layernorm_pre"),
        **_norm("norm", f"{_LLAMA4}.layernorm_post"),
        **_norm("layers.{L}.attn_norm", f"{_LLAMA4_LAYER}.input_layer_norm"),
        **_norm("layers.{L}.mlp_norm", f"{_LLAMA4_LAYER}.post_attention_layer_norm"),
        **_attention("layers.{L}.attn", f"{_LLAMA4_LAYER}.self_attention_vision"),
        **_dense("layers.{L}.mlp.up", f"{_LLAMA4_LAYER}.Llama4VisionMLP_0.vit_encoder_layer_mlp_fc1"),
        **_dense("layers.{L}.mlp.down", f"{_LLAMA4_LAYER}.Llama4VisionMLP_0.vit_encoder_layer_mlp_fc2"),
        "adapter.up.kernel": f"{_SHUFFLED}_fc1.kernel",
        "adapter.down.kernel": f"{_SHUFFLED}_fc2.kernel",
        "projector.matrix.kernel": "vision_encoder.Llama4MultiModalProjector_0.vit_multi_modal_projector.kernel",
    }
)

_OMNI, _OMNI_LAYER = (
    "audio_encoder.Qwen3OmniAudioEncoder_0",
    "audio_encoder.Qwen3OmniAudioEncoder_0.layers_{L}",
)
OMNI_SOUNDS = PartPlaces(
    {
        "convs.0.kernel": Place(f"{_OMNI}.conv2d1.kernel", "q p 1 C -> p q 1 C"),
        "convs.1.kernel": Place(f"{_OMNI}.conv2d2.kernel", "q p E C -> p q E C"),
        "convs.2.kernel": Place(f"{_OMNI}.conv2d3.kernel", "q p E C -> p q E C"),
        **{f"convs.{i}.bias": f"{_OMNI}.conv2d{i + 1}.bias" for i in range(3)},
        "entry.kernel": Place(f"{_OMNI}.conv_out.kernel", "M C D -> (C M) D"),
        **_norm("layers.{L}.attn_norm", f"{_OMNI_LAYER}.input_layer_norm"),
        **_norm("layers.{L}.mlp_norm", f"{_OMNI_LAYER}.post_attention_layer_norm"),
        **_attention("layers.{L}.attn", f"{_OMNI_LAYER}.self_attention_audio"),
        **_dense("layers.{L}.mlp.up", f"{_OMNI_LAYER}.AudioMLP.wi"),
        **_dense("layers.{L}.mlp.down", f"{_OMNI_LAYER}.AudioMLP.wo"),
        **_norm("norm", f"{_OMNI}.layernorm_post"),
        **_dense("projector.up", "audio_encoder.Qwen3OmniAudioProjector_0.proj1"),
        **_dense("projector.down", "audio_encoder.Qwen3OmniAudioProjector_0.proj2"),
    }
)
