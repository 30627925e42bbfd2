"""BLIP-2: learned queries that read an image, before OPT."""

from helpers.sights import IMAGE, TEXT, Sight, noise, sight, tiny
from helpers.sights_llava import with_images


@sight
def blip_2() -> Sight:
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    text = {key: TEXT[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    query = {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = Blip2Config(
        text_config={**text, "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
        vision_config={**vision, "image_size": 12, "patch_size": 4},
        qformer_config={**query, "vocab_size": 7},
        num_query_tokens=5,
        image_token_index=IMAGE,
    )
    rows = [[5, *with_images(5, 5), 7], [8, 4, *with_images(5), 6]]
    return Sight(tiny(Blip2ForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 12, 12)})
