"""Models that no family reads, with the reasons. docs/families.md has the same table."""

from collections.abc import Mapping

_QUERIES = "learned queries that read the prompt beside an image: not written yet"
_CROSS = "decoders that attend to images or to sound, or that write sound"
_RECURRENT = "recurrent networks without attention"
_ENCODERS = "encoders that may be run as decoders"
_BEHIND_ENCODER = "decoders of models with an encoder"

MODELS_LEFT_OUT: Mapping[str, str] = {
    "cpmant": "tokens of a text see those behind them, so that its logits depend on how a text is cut into calls",
    "blt": "bytes that are joined to patches by another model",
    "doge": "masks that are made of values",
    **dict.fromkeys(("instructblip", "instructblipvideo"), _QUERIES),
    "voxtral_realtime": "the audio embedding is added to the embedding of each token; transformers refuses text "
    "without sound",
    "unlimited_ocr": "a sliding window beside which tokens see the whole prompt, so that the mask depends on where the "
    "prompt ends",
    **dict.fromkeys(("moshi", "git", "musicgen", "musicgen_melody", "blip", "idefics", "evolla"), _CROSS),
    **dict.fromkeys(
        ("chameleon", "kyutai_speech_to_text"), "tokens of a codec of images or sounds, which is not written"
    ),
    **dict.fromkeys(("kosmos-2", "kosmos-2.5"), "an image behind a projector of its own: not written yet"),
    "pi0": "actions of a robot, not tokens",
    "shieldgemma2": "probabilities of policies, not tokens",
    **dict.fromkeys(("rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(
        (
            *("bert", "big_bird", "camembert", "electra", "ernie", "reformer", "rembert", "roberta", "roc_bert"),
            *("roformer", "xlm", "xlnet", "xmod", "bert-generation", "data2vec-text", "megatron-bert"),
            *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
        ),
        _ENCODERS,
    ),
    **dict.fromkeys(
        (
            *("bart", "mbart", "marian", "pegasus", "blenderbot", "plbart", "mvp", "bigbird_pegasus", "prophetnet"),
            *("trocr", "whisper", "blenderbot-small", "t5gemma2", "vision-encoder-decoder", "udop", "pix2struct"),
            *("florence2", "pp_formulanet"),
        ),
        _BEHIND_ENCODER,
    ),
}
"""By model_type of config.json, why no family reads the model."""
