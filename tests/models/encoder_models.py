"""Speech encoders and vision transformers of transformers, and the rows that each of them is tried with.

A row is a wave, a spectrogram, or the patches of an image. Waves and spectrograms go to the model as they are. The
modules that embed an image run on each image alone; the rest of the model runs on the rows of all images.
"""

import functools
from collections import namedtuple

import torch

from tests.models.zoo import NO_DROPOUT, TINY, TINY_PAIR, TINY_SPEECH, TINY_VISION, floats

# The model class in transformers, its sizes, and its inputs, one for each row. Then the dimension of an input that is
# ragged, and further arguments, where a list has one for each row. Then the modules that embed an image, the path of
# the encoder in the model, and the weight of each row's loss.
Encoder = namedtuple(
    "Encoder",
    "model sizes rows dim options embeds part weights",
    defaults=[0, {}, (), "", (1, 1, 1)],
)

LENGTHS, MELS = (40, 17, 26), 16
WAVES, LONG_WAVES = (
    [floats(n, seed=n) for n in lengths] for lengths in ((700, 400, 540), (4000, 2400, 3200))
)
FRAMES, WIDE_FRAMES = ([floats(n, size, seed=n) for n in LENGTHS] for size in (MELS, 128))
IMAGES = [floats(3, *size, seed=size[0]) for size in ((16, 16), (8, 12), (24, 8))]
GRIDS = [torch.tensor(grid) for grid in ((4, 4), (2, 3), (6, 2))]
OFF = dict.fromkeys(
    """hidden_dropout attention_dropout activation_dropout feat_proj_dropout final_dropout layerdrop dropout
    encoder_layerdrop mask_time_prob mask_feature_prob conformer_conv_dropout drop_path_rate positional_dropout
    speech_encoder_dropout adaptor_dropout""".split(),
    0.0,
)
SPEECH = TINY_SPEECH | OFF | {"ctc_loss_reduction": "sum"}
CONFORMER = TINY | OFF | {"num_mel_bins": MELS, "subsampling_conv_channels": 8, "conv_kernel_size": 3}
LABELS = {"labels": [torch.tensor(row) for row in ([5, 6, 5, 7], [8, 9], [5])]}
VISION = TINY_VISION | NO_DROPOUT | OFF | {"projection_dim": 16, "pooler_hidden_size": 32, "qkv_bias": True}
REGISTERS = VISION | {
    "num_register_tokens": 7
}  # with the class, as many as a table of patches may be wider by
SEAMLESS = CONFORMER | {
    "feature_projection_input_dim": MELS,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 48,
    "conv_depthwise_kernel_size": 3,
}
frames = functools.partial(Encoder, rows=FRAMES)  # [B, T, F]
mels = functools.partial(  # [B, F, T]
    Encoder,
    sizes=TINY_PAIR | TINY | OFF | {"num_mel_bins": MELS, "max_source_positions": 20},
    rows=[row.T for row in FRAMES],
    dim=1,
)
channel = functools.partial(Encoder, rows=[row[None] for row in LONG_WAVES], dim=1)  # [B, 1, T]
images = functools.partial(Encoder, rows=IMAGES, embeds=["embeddings"])
resized = functools.partial(images, options={"interpolate_pos_encoding": True})

CASES = {
    "speech": {
        **{
            name: Encoder(f"{model}ForCTC", SPEECH, WAVES, options=LABELS)
            for name, model in {
                "wav2vec2": "Wav2Vec2",
                "hubert": "Hubert",
                "unispeech": "UniSpeech",
                "unispeech-sat": "UniSpeechSat",
                "data2vec-audio": "Data2VecAudio",
                "wavlm": "WavLM",
                "sew": "SEW",
                "sew-d": "SEWD",
                "wav2vec2-conformer": "Wav2Vec2Conformer",
            }.items()
        },
        "moonshine": Encoder(
            "MoonshineModel",
            TINY
            | OFF
            | {
                f"{half}_{name}": n
                for half in ("encoder", "decoder")
                for name, n in {"num_hidden_layers": 2, "num_attention_heads": 4}.items()
            },
            LONG_WAVES,
            part="encoder",
        ),
        "moonshine_streaming": Encoder(
            "models.moonshine_streaming.modeling_moonshine_streaming.MoonshineStreamingEncoder",
            TINY | OFF | {"head_dim": 8, "num_key_value_heads": 4, "sliding_windows": [[16, 4]] * 2},
            LONG_WAVES,
        ),
        "speecht5": Encoder(
            "models.speecht5.modeling_speecht5.SpeechT5EncoderWithSpeechPrenet", TINY_PAIR | SPEECH, WAVES
        ),
        "wav2vec2-bert": frames("Wav2Vec2BertForCTC", SEAMLESS | SPEECH, options=LABELS),
        "seamless_m4t": frames(
            "models.seamless_m4t.modeling_seamless_m4t.SeamlessM4TSpeechEncoder", SEAMLESS
        ),
        "seamless_m4t_v2": frames(
            "models.seamless_m4t_v2.modeling_seamless_m4t_v2.SeamlessM4Tv2SpeechEncoder", SEAMLESS
        ),
        "speech_to_text": frames(
            "models.speech_to_text.modeling_speech_to_text.Speech2TextEncoder",
            TINY_PAIR | OFF | {"input_feat_per_channel": MELS, "conv_channels": 16},
        ),
        "lasr": frames("LasrForCTC", {"encoder_config": CONFORMER}),
        "parakeet": frames("ParakeetEncoder", CONFORMER | {"subsampling_factor": 4}),
        "nemotron_asr_streaming": frames("NemotronAsrStreamingEncoder", CONFORMER),
        "granite_speech": frames(
            "models.granite_speech.modeling_granite_speech.GraniteSpeechCTCEncoder",
            CONFORMER
            | {
                "input_dim": MELS,
                "hidden_dim": 32,
                "num_layers": 2,
                "num_heads": 4,
                "dim_head": 8,
                "context_size": 8,
            }
            | {"output_dim": 10},
        ),
        "gemma4": Encoder("models.gemma4.modeling_gemma4.Gemma4AudioModel", TINY | OFF, WIDE_FRAMES),
        "glmasr": mels("GlmAsrEncoder"),
        "voxtral_realtime": mels("VoxtralRealtimeEncoder"),
        "whisper": mels("models.whisper.modeling_whisper.WhisperEncoder"),
        "qwen2_audio": mels("Qwen2AudioEncoder"),
        "voxtral": mels("VoxtralEncoder"),
        "dac": channel(
            "DacModel",
            {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "hidden_size": 32},
            part="encoder",
        ),
        "pe_audio": channel(
            "PeAudioEncoder",
            TINY
            | {"dac_config": {"hidden_size": 32, "encoder_hidden_size": 8, "downsampling_ratios": [2, 4]}},
        ),
        "vibevoice_acoustic_tokenizer": channel(
            "VibeVoiceAcousticTokenizerEncoderModel",
            {"num_filters": 4, "hidden_size": 8, "downsampling_ratios": [2, 4], "depths": [1, 1, 1]},
        ),
        "mimi": channel(
            "MimiEncoderModel",
            TINY | {"num_filters": 4, "upsampling_ratios": [4, 2], "num_key_value_heads": 4},
        ),
        "encodec": channel(
            "EncodecModel", {"hidden_size": 32, "num_filters": 4, "upsampling_ratios": [4, 2]}, part="encoder"
        ),
    },
    "vision": {
        **{
            name: resized(f"{model}Model", VISION)
            for name, model in {
                "altclip": "AltCLIPVision",
                "blip": "BlipVision",
                "blip_2": "Blip2Vision",
                "chinese_clip": "ChineseCLIPVision",
                "clip": "CLIPVision",
                "clipseg": "CLIPSegVision",
                "deit": "DeiT",
                "dinov2": "Dinov2",
                "dinov2_with_registers": "Dinov2WithRegisters",
                "flava": "FlavaImage",
                "ijepa": "IJepa",
                "instructblip": "InstructBlipVision",
                "internvl": "InternVLVision",
                "janus": "JanusVision",
                "metaclip_2": "MetaClip2Vision",
                "pixio": "Pixio",
                "qianfan_ocr": "QianfanOCRVision",
                "siglip": "SiglipVision",
                "tipsv2": "Tipsv2Vision",
                "vit": "ViT",
                "vit_msn": "ViTMSN",
            }.items()
        },
        **{
            # Tables of 8 registers and patches, and tables of patches, have widths that are multiples of 8.
            name: images(
                f"{model}Model", VISION | {"num_register_tokens": 7}, embeds=["embeddings", "rope_embeddings"]
            )
            for name, model in {"dinov3_vit": "DINOv3ViT", "sapiens2": "Sapiens2"}.items()
        },
        "beit": resized("BeitModel", VISION | {"use_relative_position_bias": True}),
        **{
            # The whole model makes a mask of the pixels, which a compiled model hands on.
            name: Encoder(
                f"models.{name}.modeling_{name}.{model}VisionTransformer",
                VISION,
                [floats(n, 32, seed=n) for n in (16, 6, 12)],
                part="encoder",
            )
            for name, model in {"idefics2": "Idefics2", "idefics3": "Idefics3", "smolvlm": "SmolVLM"}.items()
        },
        "mlcd": images("MLCDVisionModel", VISION, embeds=["embeddings", "vision_rotary_embedding"]),
        "owlv2": resized("Owlv2VisionModel", VISION, embeds=["vision_model.embeddings"]),
        "owlvit": resized("OwlViTVisionModel", VISION, embeds=["vision_model.embeddings"]),
        "radio": images("RadioModel", VISION),
        "sam3": images("Sam3ViTModel", VISION),
        "siglip2": Encoder(
            "Siglip2VisionModel",
            VISION | {"num_patches": 16},
            [floats(int(grid.prod()), 48, seed=int(grid[0])) for grid in GRIDS],
            options={"pixel_attention_mask": None, "spatial_shapes": GRIDS},
        ),
        "step3p7": images("Step3p7VisionModel", VISION),
    },
}
