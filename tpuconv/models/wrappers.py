"""Multimodal models around the text model of a family: the table of these wrappers. The family of a text model of the
type `qwen2` in the wrapper `llava` is named `llava.qwen2`. Rows without modalities convert the text model alone.
One file because it is one table.

A text model that exists in one multimodal model alone, or is changed by it, is a family of its own, declared by
`wrapper` (`models/lineages/gemma.py`).
In all rows here text meets the text model alone, and each token of it sees those before it.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from typing import Any

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import Modality
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.thinker import SPEAKS
from tpuconv.models.common.wrapper import BRINGS, LLAVA, SEES, WrapperConfig, inside, outside_of
from tpuconv.models.registry import Family, family_of_type
from tpuconv.models.towers.blip.family import BLIP2_VISION
from tpuconv.models.towers.conformer.family import GRANITE_AUDIO
from tpuconv.models.towers.dots.family import DOTS_VISION, in_keys_of_dots
from tpuconv.models.towers.fastvit.family import FAST_VISION
from tpuconv.models.towers.intern_vit.family import (
    AYA_VISION,
    COMMAND_A_VISION,
    INTERNS1_VISION,
    INTERNVL_CHAT_VISION,
    INTERNVL_VISION,
    NVLM_VISION,
    QIANFAN_VISION,
)
from tpuconv.models.towers.intern_vit.released import in_keys_of_internvl
from tpuconv.models.towers.janus.family import JANUS_VISION
from tpuconv.models.towers.llava.modalities import (
    DEEPSEEK_VL_HYBRID_VISION,
    DEEPSEEK_VL_VISION,
    LIGHTON_VISION,
    LLAVA_NEXT_VIDEO_VISION,
    LLAVA_NEXT_VISION,
    LLAVA_VISION,
    ONEVISION_VISION,
    VIDEO_LLAVA_VISION,
    VIP_LLAVA_VISION,
)
from tpuconv.models.towers.minicpm.family import MINICPM47_VISION, MINICPM_VISION
from tpuconv.models.towers.minicpm.released import (
    KEYS_OF_SLICES,
    KEYS_OF_SPEECH,
    SLICED_VISION,
    in_keys_of_minicpm_o,
    in_keys_of_minicpm_v,
)
from tpuconv.models.towers.navit.family import IDEFICS2_VISION, IDEFICS3_VISION
from tpuconv.models.towers.ovis.family import OVIS25_VISION, OVIS_VISION, in_keys_of_ovis25
from tpuconv.models.towers.packed_vit.gated_family import LFM3_VISION
from tpuconv.models.towers.parakeet.released import (
    KEYS_OF_MEDIA,
    LLAMA_NEMOTRON_VISION,
    NEMOTRON_AUDIO,
    NEMOTRON_OMNI_TYPES,
    NEMOTRON_VISION,
    in_keys_of_nemotron_omni,
    in_keys_of_nemotron_vl,
)
from tpuconv.models.towers.perception.family import PERCEPTION_VISION
from tpuconv.models.towers.phi3.family import KEYS_OF_IMAGES, PHI3_VISION, in_keys_of_phi3_v
from tpuconv.models.towers.qwen_audio.family import QWEN3_ASR_AUDIO
from tpuconv.models.towers.qwen_vit.modalities import COMPASS_VISION, EXAONE_VISION, HYPERCLOVA_VISION, OPENCUA_VISION
from tpuconv.models.towers.sam.family import GOT_VISION
from tpuconv.models.towers.sanm.family import FUN_AUDIO
from tpuconv.models.towers.siglip.family import PALIGEMMA_VISION
from tpuconv.models.towers.siglip2.family import LFM2_VISION, VIDEO_LLAMA3_VISION
from tpuconv.models.towers.step_vit.family import ROBOTICS_VISION, STEP3_VISION
from tpuconv.models.towers.vibevoice.family import VIBEVOICE_AUDIO, VIBEVOICE_KEYS, with_one_audio_config
from tpuconv.models.towers.wav2vec2.family import OMNI_AUDIO
from tpuconv.models.towers.whisper.family import (
    FLAMINGO_AUDIO,
    GLM_AUDIO,
    MOSS_AUDIO,
    MUSIC_AUDIO,
    QWEN2_AUDIO,
    SPEECH_AUDIO,
    VOXTRAL_AUDIO,
)

IN_CAUSAL_MODEL, IN_MODEL, IN_IDEFICS = "language_model.model.", "model.language_model.", "model.text_model."
"""Prefixes of the text model: of a causal model inside another, as until transformers 4.51; of a part of the model; and
that of Idefics and SmolVLM."""

DEEPSEEK_VL = outside_of((DEEPSEEK_VL_VISION,))

REPEATED_KEYS = ("vocab_size", "hidden_size", "ignore_index")
"""Keys that releases have beside `text_config` too, where they are of no use to the text model."""
LFM2_VL_KEYS = (
    *("downsample_factor", "do_image_splitting", "encoder_patch_size", "max_image_tokens", "min_image_tokens"),
    *("max_num_patches", "max_pixels_tolerance", "max_tiles", "min_tiles", "tile_size", "use_image_special_tokens"),
    "use_thumbnail",
)
INTERNVL_KEYS = (
    *("dynamic_image_size", "force_image_size", "max_dynamic_patch", "min_dynamic_patch", "pad2square", "ps_version"),
    *("system_message", "template", "use_backbone_lora", "use_llm_lora", "use_thumbnail"),
)
GRANITE_SPEECH_KEYS = ("encoder_config", "projector_config", "has_lora_adapter", "downsample_rate", "window_size")
MINICPM_V_KEYS = (
    *("patch_size", "insert_layer_id", "drop_vision_last_layer", "downsample_mode", "merge_kernel_size"),
    "merger_times",
)


@dataclass(frozen=True)
class Wrapper:
    """A multimodal model.

    Attributes:
        model_type: of config.json.
        named: the architecture of config.json, without `end`.
        models: the models that were released.
        texts: the types of the text models that they have. The first one is that of a config.json that does not say it.
        skips: names of the modules outside of the text model, and why they are skipped, if these are not the modules of
            the modalities. They may stand below `model.`.
        tensors: the same of single tensors.
        copies: names of tensors that releases may have twice, and of their originals.
        prefix: that of the text model in releases.
        head: the prefix of the head in releases; by default that of `tpuconv.models.common.wrapper.PREFIXES`.
        released_as: the `model_type` of config.json in releases with code of their own, and the architecture, if these
            differ.
        keys: keys beside `text_config` that are for what is outside alone.
        only: keys of `text_config` with the values that the text model has in this wrapper.
        tied: `tie_word_embeddings` where neither a key nor the tensors say it.
        modalities: how it sees and hears.
        in_keys: returns a parsed config.json in the keys that are read, where a release has others.
    """

    model_type: str
    named: str
    models: str
    texts: tuple[str, ...]
    skips: Mapping[str, str] = field(default_factory=dict)
    _: KW_ONLY
    tensors: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    prefix: str = IN_MODEL
    head: str | None = None
    released_as: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tied: bool = False
    modalities: tuple[Modality, ...] = ()
    end: str = "ForConditionalGeneration"
    in_keys: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    @property
    def architecture(self) -> str:
        """The architecture of config.json."""
        return f"{self.named}{self.end}"

    @property
    def outside(self) -> Mapping[str, str]:
        """Names of the modules outside of the text model, and why they are skipped."""
        return self.skips or outside_of(self.modalities)

    def around(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a parsed config.json in the keys that are read."""
        return raw if self.in_keys is None else self.in_keys(raw)

    @property
    def families(self) -> list[str]:
        """The names of the families of its text models."""
        return [f"{self.model_type}.{text}" for text in self.texts]

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {"model_type": self.model_type, "architecture": self.architecture, "families": self.families}


INTERNVL_CHAT_KEYS = (*INTERNVL_KEYS, "downsample_ratio")


def like_internvl(model_type: str, named: str, models: str, texts: tuple[str, ...], **changes: Any) -> Wrapper:
    """Returns a wrapper whose releases have the code of InternVL, or its like, with them."""
    facts = {
        **{"prefix": IN_CAUSAL_MODEL, "keys": INTERNVL_CHAT_KEYS, "modalities": (INTERNVL_CHAT_VISION,)},
        **{"end": "Model", "in_keys": in_keys_of_internvl},
    }
    return Wrapper(model_type, named, f"{models}, with code of its own", texts, **{**facts, **changes})


def like_ovis25(model_type: str, named: str, models: str, text: str, **changes: Any) -> Wrapper:
    """Returns a wrapper whose releases have the code of Ovis 2.5 with them."""
    return Wrapper(
        model_type,
        named,
        f"{models}, with code of its own",
        (text,),
        prefix="llm.model.",
        head="llm.lm_head.",
        keys=("visual_indicator_token_ids",),
        modalities=(OVIS25_VISION,),
        in_keys=in_keys_of_ovis25,
        **changes,
    )


def like_nemotron(model_type: str, named: str, models: str, *modalities: Modality, **changes: Any) -> Wrapper:
    """Returns a wrapper around Nemotron-H with RADIO."""
    return Wrapper(
        model_type,
        named,
        models,
        ("nemotron_h",),
        prefix="language_model.",
        head="language_model.lm_head.",  # the other names of Nemotron-H begin with `backbone.`
        keys=KEYS_OF_MEDIA,
        modalities=modalities,
        end="",
        **{"in_keys": in_keys_of_nemotron_omni, **changes},
    )


WRAPPER_ROWS = (
    # what sees
    Wrapper(
        "llava",
        "Llava",
        "LLaVA 1.5, Pixtral 12B, BakLLaVA",
        ("llama", "mistral", "qwen2"),
        prefix=IN_CAUSAL_MODEL,
        modalities=LLAVA_VISION,
    ),
    Wrapper(
        "llava_next",
        "LlavaNext",
        "LLaVA 1.6, Granite Vision 3",
        ("llama", "mistral", "qwen2", "granite"),
        LLAVA,
        tensors={"image_newline": BRINGS},
        prefix=IN_CAUSAL_MODEL,
        modalities=LLAVA_NEXT_VISION,
    ),
    Wrapper(
        "llava_next_video",
        "LlavaNextVideo",
        "LLaVA-NeXT-Video",
        ("llama", "mistral", "qwen2"),
        LLAVA,
        tensors={"image_newline": BRINGS},
        prefix=IN_CAUSAL_MODEL,
        keys=("spatial_pool_mode", "spatial_pool_stride"),
        modalities=LLAVA_NEXT_VIDEO_VISION,
    ),
    Wrapper(
        "llava_onevision",
        "LlavaOnevision",
        "LLaVA-OneVision",
        ("qwen2", "qwen3"),
        LLAVA,
        tensors={"image_newline": BRINGS},
        prefix=IN_CAUSAL_MODEL,
        modalities=ONEVISION_VISION,
    ),
    Wrapper(
        "video_llava", "VideoLlava", "Video-LLaVA", ("llama",), prefix=IN_CAUSAL_MODEL, modalities=VIDEO_LLAVA_VISION
    ),
    Wrapper("vipllava", "VipLlava", "ViP-LLaVA", ("llama",), prefix=IN_CAUSAL_MODEL, modalities=VIP_LLAVA_VISION),
    Wrapper(
        "paligemma",
        "PaliGemma",
        "PaliGemma, PaliGemma 2",
        ("gemma", "gemma2"),
        prefix=IN_CAUSAL_MODEL,
        keys=("_vocab_size",),
        only={"use_bidirectional_attention": (None, True)},
        tied=True,
        modalities=(PALIGEMMA_VISION,),
    ),
    Wrapper(
        "internvl",
        "InternVL",
        "InternVL 2.5 to 3.5, in the form of transformers",
        ("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss"),
        prefix=IN_CAUSAL_MODEL,
        keys=("downsample_ratio",),
        tied=True,
        modalities=(INTERNVL_VISION,),
    ),
    Wrapper(
        "interns1",
        "InternS1",
        "Intern-S1, with code of its own",
        ("qwen3_moe", "qwen3"),
        keys=("downsample_ratio",),
        modalities=(INTERNS1_VISION,),
    ),
    like_internvl(
        "internvl_chat",
        "InternVLChat",
        "InternVL 2 to 3.5",
        ("internlm2", "qwen2", "llama", "qwen3", "qwen3_moe", "gpt_oss"),
    ),
    like_internvl("skywork_chat", "SkyworkR1VChat", "Skywork-R1V", ("qwen2",)),
    like_internvl(
        "h2ovl_chat", "H2OVLChat", "H2OVL-Mississippi", ("mistral", "llama"), keys=(*INTERNVL_CHAT_KEYS, "use_msac")
    ),
    like_internvl("NVLM_D", "NVLM_D", "NVLM-D 72B", ("qwen2",), modalities=(NVLM_VISION,), end=""),
    Wrapper(
        "aya_vision",
        "AyaVision",
        "Aya Vision",
        ("cohere2", "cohere"),
        prefix=IN_CAUSAL_MODEL,
        keys=("downsample_factor", "adapter_layer_norm_eps", "alignment_intermediate_size"),
        tied=True,
        modalities=(AYA_VISION,),
    ),
    Wrapper(
        "cohere2_vision",
        "Cohere2Vision",
        "Command A Vision",
        ("cohere2",),
        keys=("downsample_factor", "alignment_intermediate_size"),
        tied=True,
        modalities=(COMMAND_A_VISION,),
    ),
    Wrapper(
        "qianfan_ocr",
        "QianfanOCR",
        "Qianfan-OCR",
        ("qwen3",),
        prefix=IN_CAUSAL_MODEL,
        keys=("downsample_ratio",),
        modalities=(QIANFAN_VISION,),
    ),
    Wrapper(
        "got_ocr2", "GotOcr2", "GOT-OCR 2.0", ("qwen2",), prefix=IN_CAUSAL_MODEL, tied=True, modalities=(GOT_VISION,)
    ),
    Wrapper(
        "pp_chart2table",
        "GotOcr2",
        "PP-Chart2Table",
        ("qwen2",),
        prefix=IN_CAUSAL_MODEL,
        tied=True,
        modalities=(GOT_VISION,),
    ),
    Wrapper(
        "dots_ocr",
        "DotsOCR",
        "dots.ocr",
        ("qwen2",),
        prefix="model.",
        only={"attention_bias": (True,)},
        modalities=(DOTS_VISION,),
        end="ForCausalLM",
        in_keys=in_keys_of_dots,
    ),
    Wrapper("step3_vl", "Step3VL", "Step-3", ("step3_text",), prefix="model.", modalities=(STEP3_VISION,)),
    Wrapper("step_robotics", "StepVL", "Step3-VL-10B", ("qwen3",), prefix="model.", modalities=(ROBOTICS_VISION,)),
    Wrapper(
        "step3p5v",
        "MMGPTStepRobotics",
        "Step-5-Preview",
        ("step4",),
        prefix="model.",
        modalities=(ROBOTICS_VISION,),
        end="ForCausalLM",
    ),
    Wrapper(
        "opencua",
        "OpenCUA",
        "OpenCUA, with code of its own",
        ("qwen2",),
        prefix=IN_CAUSAL_MODEL,
        modalities=(OPENCUA_VISION,),
    ),
    Wrapper(
        "phi3_v",
        "Phi3V",
        "Phi-3-vision, Phi-3.5-vision",
        ("phi3",),
        prefix="model.",
        copies={"model.vision_embed_tokens.wte.weight": "model.embed_tokens.weight"},
        keys=KEYS_OF_IMAGES,
        modalities=(PHI3_VISION,),
        end="ForCausalLM",
        in_keys=in_keys_of_phi3_v,
    ),
    Wrapper(
        "blip-2",
        "Blip2",
        "BLIP-2 with OPT",
        ("opt",),
        {"vision_model": SEES, **dict.fromkeys(("qformer", "language_projection"), BRINGS)},
        tensors={"query_tokens": BRINGS},
        prefix=IN_CAUSAL_MODEL,
        keys=("qformer_config", "num_query_tokens", "use_decoder_only_language_model", "initializer_factor"),
        modalities=(BLIP2_VISION,),
    ),
    Wrapper(
        "lfm2_vl", "Lfm2Vl", "LFM2-VL", ("lfm2", "lfm2_moe"), keys=LFM2_VL_KEYS, tied=True, modalities=(LFM2_VISION,)
    ),
    Wrapper("lfm3_vl", "Lfm3Vl", "LFM3-VL", ("lfm3",), tied=True, modalities=(LFM3_VISION,)),
    Wrapper(
        "perception_lm",
        "PerceptionLM",
        "Perception LM",
        ("llama",),
        LLAVA,
        keys=("projector_pooling_ratio", "vision_use_cls_token"),
        modalities=(PERCEPTION_VISION,),
    ),
    Wrapper("fast_vlm", "FastVlm", "FastVLM", ("qwen2",), LLAVA, modalities=(FAST_VISION,)),
    Wrapper(
        "ovis2",
        "Ovis2",
        "Ovis 2",
        ("qwen2",),
        keys=("visual_indicator_token_ids",),
        tied=True,
        modalities=(OVIS_VISION,),
    ),
    like_ovis25("ovis2_5", "Ovis2_5", "Ovis 2.5", "qwen3", end=""),
    like_ovis25("ovis2_6", "Ovis2_6", "Ovis 2.6", "qwen3", end="ForCausalLM"),
    like_ovis25("ovis2_6_moe", "Ovis2_6_Moe", "Ovis 2.6 with experts", "qwen3_moe", end="ForCausalLM"),
    like_ovis25("ovis2_6_next", "Ovis2_6_Next", "Ovis 2.6 Next", "qwen3_next", end="ForCausalLM"),
    Wrapper(
        "idefics2",
        "Idefics2",
        "Idefics 2",
        ("mistral",),
        prefix=IN_IDEFICS,
        head="lm_head.",
        keys=("perceiver_config",),
        modalities=(IDEFICS2_VISION,),
    ),
    Wrapper(
        "idefics3",
        "Idefics3",
        "Idefics 3, SmolVLM",
        ("llama",),
        prefix=IN_IDEFICS,
        head="lm_head.",
        keys=("scale_factor",),
        modalities=(IDEFICS3_VISION,),
    ),
    Wrapper(
        "smolvlm",
        "SmolVLM",
        "SmolVLM 2",
        ("llama",),
        prefix=IN_IDEFICS,
        head="lm_head.",
        keys=("scale_factor",),
        modalities=(IDEFICS3_VISION,),
    ),
    Wrapper("deepseek_vl", "DeepseekVL", "DeepSeek-VL", ("llama",), tied=True, modalities=(DEEPSEEK_VL_VISION,)),
    Wrapper(
        "deepseek_vl_hybrid",
        "DeepseekVLHybrid",
        "DeepSeek-VL 7B",
        ("llama",),
        {**DEEPSEEK_VL, "high_res_vision_model": SEES, "high_res_vision_neck": SEES, "high_res_vision_proj": SEES},
        tensors={"high_res_vision_alpha": SEES},
        keys=("high_res_vision_config",),
        tied=True,
        modalities=(DEEPSEEK_VL_HYBRID_VISION,),
    ),
    Wrapper(
        "janus",
        "Janus",
        "Janus Pro",
        ("llama",),
        {
            **DEEPSEEK_VL,
            "vqmodel": "draws images",
            "generation_embeddings": "draws images",
            "generation_aligner": "draws images",
            "generation_head": "draws images",
        },
        keys=("vq_config",),
        tied=True,
        modalities=(JANUS_VISION,),
    ),
    Wrapper(
        "exaone4_5",
        "Exaone4_5_",
        "EXAONE 4.5",
        ("exaone4",),
        {"visual": SEES, "mtp": "predicts further tokens"},
        modalities=(EXAONE_VISION,),
    ),
    Wrapper("lighton_ocr", "LightOnOcr", "LightOnOCR", ("qwen3",), tied=True, modalities=(LIGHTON_VISION,)),
    Wrapper("video_llama_3", "VideoLlama3", "VideoLLaMA 3", ("qwen2",), modalities=(VIDEO_LLAMA3_VISION,)),
    Wrapper(
        "minicpm_ocr",
        "MiniCPMOcr",
        "MiniCPM-OCR",
        ("qwen3_5_text",),
        keys=MINICPM_V_KEYS,
        tied=True,
        modalities=(MINICPM_VISION,),
    ),
    Wrapper(
        "minicpmv",
        "MiniCPMV",
        "MiniCPM-V 2.6, 4 and 4.5",
        ("qwen2", "llama", "qwen3"),
        prefix="llm.model.",
        head="llm.lm_head.",
        keys=KEYS_OF_SLICES,
        modalities=(SLICED_VISION,),
        end="",
        in_keys=in_keys_of_minicpm_v,
    ),
    Wrapper(
        "minicpmo",
        "MiniCPMO",
        "MiniCPM-o 2.6, 4 and 4.5",
        ("qwen2", "llama", "qwen3"),
        {**outside_of((SLICED_VISION, SPEECH_AUDIO)), "tts": SPEAKS},
        prefix="llm.model.",
        head="llm.lm_head.",
        keys=(*KEYS_OF_SLICES, *KEYS_OF_SPEECH),
        modalities=(SLICED_VISION, SPEECH_AUDIO),
        end="",
        in_keys=in_keys_of_minicpm_o,
    ),
    Wrapper(
        "minicpmv4_6",
        "MiniCPMV4_6",
        "MiniCPM-V 4.6",
        ("qwen3_5_text",),
        keys=MINICPM_V_KEYS,
        modalities=(MINICPM_VISION,),
    ),
    Wrapper(
        "minicpmv4_7",
        "MiniCPMV4_7",
        "MiniCPM-V 4.7",
        ("qwen3_5_text",),
        keys=(*MINICPM_V_KEYS, "slice_start_id", "slice_end_id", "newline_id"),
        modalities=(MINICPM47_VISION,),
    ),
    Wrapper(
        "hyperclovax_vision_v2",
        "HyperCLOVAXVisionV2",
        "HyperCLOVA X SEED Think 32B",
        ("hyperclovax",),
        head="model.language_model.lm_head.",
        released_as={"vlm": "HCXVisionV2ForCausalLM"},
        tied=True,
        modalities=(HYPERCLOVA_VISION,),
    ),
    Wrapper(
        "cohere_compass", "CohereCompass", "North Micro Vision", ("cohere_compass_text",), modalities=(COMPASS_VISION,)
    ),
    like_nemotron(
        "nemotron_h_omni",
        "NemotronH_Omni_Reasoning_V3",
        "Nemotron 3 Nano and Super Omni",
        NEMOTRON_VISION,
        NEMOTRON_AUDIO,
        released_as={each: each for each in NEMOTRON_OMNI_TYPES},
    ),
    like_nemotron(
        "NemotronH_Nano_VL_V2",
        "NemotronH_Nano_VL_V2",
        "Nemotron Nano 12B v2 VL, with code of its own",
        NEMOTRON_VISION,
        in_keys=in_keys_of_nemotron_vl,
    ),
    Wrapper(
        "Llama_Nemotron_Nano_VL",
        "Llama_Nemotron_Nano_VL",
        "Llama 3.1 Nemotron Nano VL 8B, with code of its own",
        ("llama",),
        prefix=IN_CAUSAL_MODEL,
        keys=KEYS_OF_MEDIA,
        modalities=(LLAMA_NEMOTRON_VISION,),
        end="",
        in_keys=in_keys_of_nemotron_vl,
    ),
    # what hears
    Wrapper("qwen2_audio", "Qwen2Audio", "Qwen2-Audio", ("qwen2",), prefix=IN_CAUSAL_MODEL, modalities=(QWEN2_AUDIO,)),
    Wrapper("voxtral", "Voxtral", "Voxtral", ("llama",), prefix=IN_CAUSAL_MODEL, modalities=(VOXTRAL_AUDIO,)),
    Wrapper("glmasr", "GlmAsr", "GLM-ASR", ("llama",), prefix=IN_CAUSAL_MODEL, tied=True, modalities=(GLM_AUDIO,)),
    Wrapper(
        "audioflamingo3",
        "AudioFlamingo3",
        "Audio Flamingo 3",
        ("qwen2",),
        prefix=IN_CAUSAL_MODEL,
        modalities=(FLAMINGO_AUDIO,),
    ),
    Wrapper(
        "musicflamingo",
        "MusicFlamingo",
        "Music Flamingo",
        ("qwen2",),
        prefix=IN_CAUSAL_MODEL,
        keys=("rope_parameters", "head_dim", "max_position_embeddings"),
        modalities=(MUSIC_AUDIO,),
    ),
    Wrapper(
        "vibevoice_asr",
        "VibeVoiceAsr",
        "VibeVoice-ASR",
        ("qwen2",),
        prefix=IN_CAUSAL_MODEL,
        keys=VIBEVOICE_KEYS,
        modalities=(VIBEVOICE_AUDIO,),
        in_keys=with_one_audio_config,
    ),
    Wrapper(
        "granite_speech",
        "GraniteSpeech",
        "Granite Speech 3.2 to 4.1",
        ("granite",),
        prefix=IN_CAUSAL_MODEL,
        keys=GRANITE_SPEECH_KEYS,
        tied=True,
        modalities=(GRANITE_AUDIO,),
    ),
    Wrapper(
        "granite_speech_plus",
        "GraniteSpeechPlus",
        "Granite Speech 4.1 Plus",
        ("granite",),
        prefix=IN_CAUSAL_MODEL,
        keys=GRANITE_SPEECH_KEYS,
        tied=True,
        modalities=(GRANITE_AUDIO,),
    ),
    Wrapper(
        "fun_asr_nano",
        "FunAsrNano",
        "Fun-ASR-Nano",
        ("qwen3",),
        keys=("adaptor_config",),
        tied=True,
        modalities=(FUN_AUDIO,),
    ),
    Wrapper(
        "moss_transcribe_diarize",
        "MossTranscribeDiarize",
        "MOSS-Transcribe-Diarize",
        ("qwen3",),
        tied=True,
        modalities=(MOSS_AUDIO,),
    ),
    Wrapper(
        "omniasr",
        "OmniASR",
        "Omnilingual ASR, with a language model",
        ("llama",),
        modalities=(OMNI_AUDIO,),
    ),
    Wrapper(
        "qwen3_asr",
        "Qwen3ASR",
        "Qwen3-ASR",
        ("qwen3",),
        keys=("token_classification_bias",),
        tied=True,
        modalities=(QWEN3_ASR_AUDIO,),
    ),
)
WRAPPERS: Mapping[str, Wrapper] = {row.model_type: row for row in WRAPPER_ROWS}
"""By model type."""
RELEASED_AS: Mapping[str, Wrapper] = {kind: row for row in WRAPPER_ROWS for kind in row.released_as}
"""By the model type of releases with code of their own."""


def wrapped_family(hf_config: Mapping[str, Any]) -> Family | None:
    """Returns the family of the text model that a parsed config.json of a wrapper has; None if it is of no wrapper.

    Raises:
        UnsupportedConfig: no family reads the text model.
    """
    found_type = str(hf_config.get("model_type"))
    wrapper = WRAPPERS.get(found_type) or RELEASED_AS.get(found_type)
    if wrapper is None:
        return None
    text = wrapper.around(hf_config).get("text_config")
    found = text.get("model_type") if isinstance(text, Mapping) else None
    text_type = wrapper.texts[0] if found is None else found
    if text_type not in wrapper.texts:
        raise UnsupportedConfig(
            f"no family reads a text model of the type {short(text_type)} in {wrapper.model_type}",
            hint=f"known are {', '.join(wrapper.texts)}",
        )
    return wrapped(wrapper.model_type, text_type)


@cache
def wrapped(model_type: str, text_type: str) -> Family:
    """Returns the family of the text models of one type in a wrapper."""
    wrapper, text = WRAPPERS[model_type], family_of_type(text_type)
    assert text is not None
    released = {architecture: kind for kind, architecture in wrapper.released_as.items()}
    table = inside(text.table, wrapper.prefix, wrapper.outside, tensors=wrapper.tensors, head=wrapper.head)
    return Family(
        name=f"{model_type}.{text_type}",
        summary=f"{wrapper.models}: the text model, as {text.name}",
        config=_config_class(wrapper, text.config.of_type(text_type)),
        table=replace(table, copies={**table.copies, **wrapper.copies}),
        aliases=text.aliases,
        forms=text.forms,
        model=text.model,
        architectures={wrapper.architecture: model_type, **released},
        text_types=(text_type,),
        text=text.name,
        modalities=wrapper.modalities,
    )


def _config_class(wrapper: Wrapper, text: type[DecoderConfig]) -> type[DecoderConfig]:
    """The config of a text model, read from the `text_config` of the wrapper's."""
    facts = {
        "wrapper_type": wrapper.model_type,
        "outside_keys": frozenset((*wrapper.keys, *REPEATED_KEYS)),
        "only": {**text.only, **wrapper.only},
        "tied": wrapper.tied,
        "around_text": classmethod(lambda cls, raw: wrapper.around(raw)),
    }
    return type(
        "Config", (WrapperConfig, text), {**facts, "__module__": __name__, "__doc__": "The keys of `text_config`."}
    )
