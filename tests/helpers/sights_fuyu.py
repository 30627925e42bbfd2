"""Fuyu: patches behind a matrix."""

from helpers.sights import IMAGE, TEXT, Sight, noise, sight, tiny


@sight
def fuyu() -> Sight:
    """Patches of an image are in rows, which a token of the text ends."""
    from transformers import FuyuConfig, FuyuForCausalLM

    text = {key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "head_dim")}
    config = FuyuConfig(text_config={**text, "model_type": "persimmon"}, patch_size=4, image_token_id=IMAGE)
    image = [*[IMAGE] * 3, 94] * 2
    rows = [[*image, *image, 1, 5, 9, 11, 7], [*image, 1, 8, 4, 6]]
    return Sight(tiny(FuyuForCausalLM, config), rows, {"pixel_values": noise(3, 6, 48)})
