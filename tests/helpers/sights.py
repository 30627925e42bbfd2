"""Tiny multimodal models with images or sounds, to compare with transformers. Sizes are odd and unequal, so that rows
and columns, or width and output, cannot be confused.

A module of this folder whose name begins with `sights_` adds cases: each is a function that returns a `Sight`, with the
decorator `sight`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from helpers.checkpoints import read_tensors
from helpers.families import CASES, SIZES
from tpuconv.verify.reference_calls import masks_of_generate, mended

IMAGE, SOUND, START, END = 96, 95, 93, 94
"""Ids of the placeholders, and of what stands around them. The vocabulary has 97 tokens."""

TEXT: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""The keys of a text model."""


@dataclass(frozen=True)
class Sight:
    """A model and a batch with images or sounds.

    Attributes:
        model: of transformers, in float32, with random weights.
        rows: the token ids of each text, of which shorter ones are padded on the left.
        features: what the processor of the release returns.
        kinds: the numbers by which the reference tells placeholders from text, by the name of its argument:
            `token_type_ids` or `mm_token_type_ids`; for each the ids of placeholders and their numbers.
        later: ids of further tokens of each text, for the cache.
        parts: of the checkpoint.
        tolerance: of logits, by their largest value.
        derived: pattern of tensors that follow from config.json and do not come back.
        released: patterns in the names that transformers writes, and what releases have in their place.
        as_released: makes the folder that transformers wrote one of a release with code of its own.
        masks_of_generate: whether the reference's masks are those of its `generate`, where its call has others.
        by_token: the features with a second axis of tokens, whose last entry is that of later tokens.
        tells_prompt: the argument by which the reference tells the prompt, all 0, from the tokens behind it, 1.
    """

    model: Any
    rows: Sequence[Sequence[int]]
    features: Mapping[str, np.ndarray]
    kinds: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    later: Sequence[Sequence[int]] = ((4, 8), (9, 11))
    parts: Sequence[str] = ("vision",)
    tolerance: float = 1e-5
    derived: str = "nothing"
    released: Mapping[str, str] = field(default_factory=dict)
    as_released: Callable[[Path], None] | None = None
    masks_of_generate: bool = False
    by_token: Sequence[str] = ()
    tells_prompt: str = ""

    @property
    def ids_BT(self) -> np.ndarray:
        longest = max(map(len, self.rows))
        return np.array([[0] * (longest - len(row)) + list(row) for row in self.rows])

    @property
    def mask_BT(self) -> np.ndarray:
        longest = max(map(len, self.rows))
        return np.array([[False] * (longest - len(row)) + [True] * len(row) for row in self.rows])

    def config_json(self) -> dict[str, Any]:
        """The parsed config.json."""
        raw: dict[str, Any] = json.loads(self.model.config.to_json_string())
        return raw

    def save_modules(self, folder: Path) -> None:
        """Writes the model with the names of transformers' own modules."""
        self.model.save_pretrained(folder, save_original_format=False)

    def save(self, folder: Path) -> None:
        """Writes the model with the names of releases."""
        self.model.save_pretrained(folder)
        if self.released:
            tensors = read_tensors(folder)
            for pattern, name in self.released.items():
                tensors = {re.sub(pattern, name, old): tensor for old, tensor in tensors.items()}
            save_file(tensors, folder / "model.safetensors")
        if self.as_released is not None:
            self.as_released(folder)

    def reference(
        self, ids_BT: np.ndarray, mask_BT: np.ndarray, features: Mapping[str, np.ndarray], prompt: int | None = None
    ) -> np.ndarray:
        """The logits [B, T, V] of transformers, or hidden states [B, T, D] of a model without a head, in float32.
        Features are rounded to the dtype of the model. The first `prompt` tokens are the prompt; by default as many as
        the texts of this case have."""
        import torch

        for name in self.by_token:
            more = ids_BT.shape[1] - features[name].shape[1]
            features = {**features, name: np.concatenate([features[name], *[features[name][:, -1:]] * more], axis=1)}
        kinds, arrays = {}, {name: torch.tensor(value) for name, value in features.items()}
        for name, numbers in self.kinds.items():
            kinds[name] = torch.tensor(sum(number * (ids_BT == token) for token, number in numbers.items()))
        if self.tells_prompt:
            prompt = self.ids_BT.shape[1] if prompt is None else prompt
            kinds[self.tells_prompt] = (torch.arange(ids_BT.shape[1]) >= prompt).long().expand(ids_BT.shape)
        mask = torch.tensor(mask_BT.astype(np.int64))
        if self.masks_of_generate:
            mask = masks_of_generate(self.model, mask, **kinds)
        with torch.no_grad():
            out = getattr(self.model, "thinker", self.model)(
                input_ids=torch.tensor(ids_BT),
                attention_mask=mask,
                **kinds,
                **{name: x.to(self.model.dtype) if x.is_floating_point() else x for name, x in arrays.items()},
            )
        found = out.logits if "logits" in out else out.last_hidden_state  # of a model without a head
        return np.asarray(found.float())


MINICPM_V = ("minicpmv_2_6", "minicpmv_4_0", "minicpmv_4_5")
MINICPM_O = ("minicpmo_2_6", "minicpmo_4_5")
OF_OTHER_TYPES = (
    "internvl_chat",
    "internvl_chat_6b",
    "skywork_chat",
    "h2ovl_chat",
    "nvlm_d",
    "step3_vl",
    "step_robotics",
    "step3p5v",
    "kimi_vl",
    "dots_ocr",
    "phi3_v",
    "mimo_v2",
    "ovis2_5",
    "ovis2_6",
    "ovis2_6_moe",
    "nemotron_nano_vl",
    "llama_nemotron_nano_vl",
    "opencua",
    "interns1",
    "intern_s2_preview",
    "keye_vl",
    "keye_vl_1_5",
    *MINICPM_V,
    *MINICPM_O,
)
"""Cases of releases with code of their own: transformers' model is of another type, which has cases too, or it has none
of them."""
SIGHTS: dict[str, Callable[[], Sight]] = {}
"""By name."""


def sight(make: Callable[[], Sight]) -> Callable[[], Sight]:
    """Adds a case under the name of its function."""
    SIGHTS[make.__name__] = make
    return make


def eager(config: Any) -> Any:
    """A config of which all parts use the eager attention, which alone takes all masks."""
    config._attn_implementation = "eager"
    for part in vars(config).values():
        if hasattr(part, "_attn_implementation"):
            eager(part)
    return config


def chosen(config: Any) -> Any:
    """The config of a case; `helpers.random_sights` puts other ones in its place."""
    return config


def tiny(cls: Any, config: Any, seed: int = 0) -> Any:
    """A model of transformers with random weights, norms and biases."""
    import torch

    config = chosen(config)
    torch.manual_seed(seed)
    model = (cls.from_config if hasattr(cls, "from_config") else cls)(eager(config)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4, -1)  # else sums of rates are so large that float32 loses their differences
            elif parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
            else:
                is_scale = name.endswith("weight") and "norm" in name.rpartition(".")[0].lower()
                parameter.copy_(0.3 * torch.randn_like(parameter) + is_scale)
    return mended(model)


def noise(*shape: int, seed: int = 1) -> np.ndarray:
    """Random features."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@sight
def gemma3() -> Sight:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    # Images are longer than the window, so that it cuts them.
    text = {
        **TEXT,
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 8,
    }
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 24,
        "patch_size": 4,
    }
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=9, image_token_index=IMAGE, boi_token_index=START
    )
    image = [START, *[IMAGE] * 9, END]
    rows = [[5, 9, *image, 3, *image, 11, 7], [8, 4, *image, 6]]
    kinds = {"token_type_ids": {IMAGE: 1}}
    return Sight(tiny(Gemma3ForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 24, 24)}, kinds)


QWEN_VISION: Mapping[str, Any] = {
    "depth": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 92,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
GRIDS = np.array([(1, 6, 10), (1, 8, 4), (1, 4, 8)])


def qwen(cls: Any, config: Any, seed: int = 0, **changes: Any) -> Sight:
    """A case of Qwen-VL or GLM-V: two texts of which one has two images, and one is padded."""
    rows = [[5, 9, START, *[IMAGE] * 15, END, 3, START, *[IMAGE] * 8, END, 11, 7], [7, START, *[IMAGE] * 8, END, 3]]
    features = {"pixel_values": noise(int(GRIDS.prod(axis=1).sum()), 3 * 2 * 4 * 4), "image_grid_thw": GRIDS}
    return Sight(tiny(cls, config, seed), rows, features, {"mm_token_type_ids": {IMAGE: 1}}, **changes)


def wide(*sections: int, **changes: Any) -> dict[str, Any]:
    """A text model with heads of 16 and rotary positions in sections."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    return {**TEXT, "hidden_size": 64, "head_dim": 16, "rope_parameters": rope, **changes}


def without_head_dim(text: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in text.items() if key != "head_dim"}


@sight
def qwen3_vl() -> Sight:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {**QWEN_VISION, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
    config = Qwen3VLConfig(text_config=wide(4, 2, 2), vision_config=vision, **QWEN_TOKENS)
    return qwen(Qwen3VLForConditionalGeneration, config)


@sight
def qwen3_vl_moe() -> Sight:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    vision = {**QWEN_VISION, "num_position_embeddings": 36, "deepstack_visual_indexes": [1]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = Qwen3VLMoeConfig(text_config=wide(4, 2, 2, **experts), vision_config=vision, **QWEN_TOKENS)
    return qwen(Qwen3VLMoeForConditionalGeneration, config)


@sight
def qwen2_5_vl() -> Sight:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=without_head_dim(wide(2, 3, 3)), vision_config=vision, **QWEN_TOKENS)
    return qwen(Qwen2_5_VLForConditionalGeneration, config)


@sight
def qwen2_vl() -> Sight:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"depth": 3, "embed_dim": 24, "num_heads": 2, "patch_size": 4, "hidden_size": 64}
    config = Qwen2VLConfig(text_config=without_head_dim(wide(2, 3, 3)), vision_config=vision, **QWEN_TOKENS)
    return qwen(Qwen2VLForConditionalGeneration, config)


@sight
def glm4v() -> Sight:
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration

    text = without_head_dim(wide(2, 3, 3))
    config = Glm4vConfig(text_config=text, vision_config={**QWEN_VISION, "image_size": 24}, **QWEN_TOKENS)
    return qwen(Glm4vForConditionalGeneration, config)


@sight
def glm46v() -> Sight:
    from transformers import Glm46VConfig, Glm46VForConditionalGeneration

    text = {**without_head_dim(wide(2, 3, 3)), "model_type": "glm4v_text"}
    vision = {**QWEN_VISION, "image_size": 24, "model_type": "glm4v_vision"}
    return qwen(Glm46VForConditionalGeneration, Glm46VConfig(text_config=text, vision_config=vision, **QWEN_TOKENS))


@sight
def glmga() -> Sight:
    from transformers import AutoModelForMultimodalLM, GlmgaConfig

    text = {**without_head_dim(wide(2, 3, 3)), "model_type": "glm4v_text"}
    vision = {**QWEN_VISION, "image_size": 24, "model_type": "glm4v_vision"}
    return qwen(AutoModelForMultimodalLM, GlmgaConfig(text_config=text, vision_config=vision, **QWEN_TOKENS))


@sight
def glm4v_moe() -> Sight:
    from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

    experts = {
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    text = wide(2, 1, 1, **experts)
    config = Glm4vMoeConfig(text_config=text, vision_config={**QWEN_VISION, "image_size": 24}, **QWEN_TOKENS)
    return qwen(Glm4vMoeForConditionalGeneration, config)


def text_of(family: str) -> dict[str, Any]:
    """The keys of the text model in the first case of a family."""
    return {**SIZES, **next(case.config for case in CASES if case.family == family)}


LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def partial(*sections: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), "partial_rotary_factor": 0.5}
    return {"rope_parameters": rope}


@sight
def qwen3_5() -> Sight:
    from transformers import AutoConfig, AutoModelForMultimodalLM

    vision = {**QWEN_VISION, "num_position_embeddings": 36}
    text = wide(**LINEAR, **partial(2, 1, 1))
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision, **QWEN_TOKENS)
    return qwen(AutoModelForMultimodalLM, config, tolerance=2e-5)


def of_qwen3_5_moe(**changes: Any) -> Sight:
    """A case of Qwen3.5 with experts."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    }
    vision = {**QWEN_VISION, "num_position_embeddings": 36}
    text = wide(**LINEAR, **experts, **partial(2, 1, 1))
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=vision, **QWEN_TOKENS)
    # with other seeds one of 1,024 random tokens is 1e-4 from float64, computed by us or by the reference
    return qwen(AutoModelForMultimodalLM, config, seed=2, tolerance=2e-5, **changes)


@sight
def qwen3_5_moe() -> Sight:
    return of_qwen3_5_moe()


def of_intern_s2(folder: Path) -> None:
    """Writes the types of Intern-S2-Preview, whose tensors and other keys are Qwen3.5's."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw |= {"architectures": ["InternS2PreviewForConditionalGeneration"], "model_type": "intern_s2_preview"}
    raw["text_config"]["model_type"] = "interns2_preview_text"
    raw["vision_config"]["model_type"] = "intern_s2_preview"
    raw |= {"ts_config": {"model_type": "interns2_preview_time_series", "d_model": 16}, "ts_token_id": 90}
    path.write_text(json.dumps(raw))


@sight
def intern_s2_preview() -> Sight:
    return of_qwen3_5_moe(as_released=of_intern_s2)


for _path in sorted(Path(__file__).parent.glob("sights_*.py")):
    import_module(f"helpers.{_path.stem}")
