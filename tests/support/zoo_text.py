"""transformers: language models, mostly with a classification head, both spellings of attention for some."""

from __future__ import annotations

import functools
from typing import Any

import torch

from catalogue import Built, Only, add

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3}
BERT = SIZES | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
LLAMA = SIZES | {"num_key_value_heads": 2, "attention_dropout": 0.1, "use_cache": False}
SEQ2SEQ = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0}
SEQ2SEQ |= {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "num_labels": 3,
}
SEQ2SEQ |= {"decoder_ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.1, "attention_dropout": 0.1}
SEQ2SEQ |= {"activation_dropout": 0.1, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ |= {"decoder_start_token_id": 1}
GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
GPT |= {"num_labels": 3, "use_cache": False, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}

# name -> configuration, network, options of the configuration, kind of inputs
NETWORKS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert_sdpa": ("BertConfig", "BertForSequenceClassification", BERT, "masked"),
    "bert_eager": ("BertConfig", "BertForSequenceClassification", BERT | {"eager": True}, "masked"),
    "bert_tagger": ("BertConfig", "BertForTokenClassification", BERT, "tokens"),
    "bert_question_answering": ("BertConfig", "BertForQuestionAnswering", BERT | {"num_labels": 2}, "tokens"),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", BERT | {"pad_token_id": 1}, "masked"),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "num_labels": 3},
        "masked",
    ),
    "electra": ("ElectraConfig", "ElectraForSequenceClassification", BERT | {"embedding_size": 16}, "masked"),
    "albert": ("AlbertConfig", "AlbertForSequenceClassification", BERT | {"embedding_size": 16}, "masked"),
    "camembert": (
        "CamembertConfig",
        "CamembertForSequenceClassification",
        BERT | {"pad_token_id": 1},
        "tokens",
    ),
    "deberta_v2": (
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        "masked",
    ),
    "mpnet": ("MPNetConfig", "MPNetForSequenceClassification", BERT | {"pad_token_id": 1}, "masked"),
    "xlnet": (
        "XLNetConfig",
        "XLNetForSequenceClassification",
        {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "num_labels": 3}
        | {"use_mems_train": False, "use_mems_eval": False},
        "tokens",
    ),
    "fnet": (
        "FNetConfig",
        "FNetForSequenceClassification",
        {k: v for k, v in BERT.items() if k not in ("attention_probs_dropout_prob", "num_attention_heads")},
        "tokens",
    ),
    "mobilebert": (
        "MobileBertConfig",
        "MobileBertForSequenceClassification",
        BERT | {"embedding_size": 32, "intra_bottleneck_size": 32, "hidden_size": 64},
        "masked",
    ),
    "squeezebert": (
        "SqueezeBertConfig",
        "SqueezeBertForSequenceClassification",
        BERT | {"embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2},
        "masked",
    ),
    "funnel": (
        "FunnelConfig",
        "FunnelForSequenceClassification",
        {"vocab_size": 99, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
        | {"num_labels": 3, "num_decoder_layers": 1},
        "tokens",
    ),
    "longformer": (
        "LongformerConfig",
        "LongformerForSequenceClassification",
        BERT | {"attention_window": 4, "pad_token_id": 1},
        "tokens",
    ),
    "big_bird": (
        "BigBirdConfig",
        "BigBirdForSequenceClassification",
        BERT | {"attention_type": "original_full"},
        "tokens",
    ),
    "gpt2_sdpa": ("GPT2Config", "GPT2ForSequenceClassification", GPT, "tokens"),
    "gpt2_eager": ("GPT2Config", "GPT2ForSequenceClassification", GPT | {"eager": True}, "tokens"),
    # decoders as they come: their outputs hold a cache of keys and values
    "gpt2_cache": ("GPT2Config", "GPT2ForSequenceClassification", GPT | {"use_cache": True}, "tokens"),
    "llama_cache": ("LlamaConfig", "LlamaForSequenceClassification", LLAMA | {"use_cache": True}, "tokens"),
    "gptj": ("GPTJConfig", "GPTJForSequenceClassification", GPT | {"rotary_dim": 4}, "tokens"),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForSequenceClassification",
        {"vocab_size": 99, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "num_labels": 3}
        | {"resid_dropout": 0.1, "embed_dropout": 0.1, "attention_dropout": 0.1, "use_cache": False}
        | {"bos_token_id": 1, "eos_token_id": 2},
        "tokens",
    ),
    "opt": (
        "OPTConfig",
        "OPTForSequenceClassification",
        SIZES
        | {"ffn_dim": 64, "dropout": 0.1, "attention_dropout": 0.1, "use_cache": False}
        | {"word_embed_proj_dim": 32},
        "tokens",
    ),
    "llama": ("LlamaConfig", "LlamaForSequenceClassification", LLAMA, "tokens"),
    "llama_eager": ("LlamaConfig", "LlamaForSequenceClassification", LLAMA | {"eager": True}, "tokens"),
    "mistral": ("MistralConfig", "MistralForSequenceClassification", LLAMA, "tokens"),
    "qwen2": ("Qwen2Config", "Qwen2ForSequenceClassification", LLAMA, "tokens"),
    "gemma": ("GemmaConfig", "GemmaForSequenceClassification", LLAMA | {"head_dim": 8}, "tokens"),
    "phi": (
        "PhiConfig",
        "PhiForSequenceClassification",
        LLAMA | {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "bos_token_id": 1, "eos_token_id": 2},
        "tokens",
    ),
    "t5_encoder": (
        "T5Config",
        "T5ForTokenClassification",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        | {"num_labels": 3, "dropout_rate": 0.1},
        "tokens",
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": 9, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.1, "use_cache": False, "decoder_start_token_id": 0},
        "pairs",
    ),
    "bart": ("BartConfig", "BartForSequenceClassification", SEQ2SEQ, "ending"),
    "mbart": ("MBartConfig", "MBartForSequenceClassification", SEQ2SEQ, "ending"),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", SEQ2SEQ | {"vocab_size": 9}, "pairs"),
    "perceiver": (
        "PerceiverConfig",
        "PerceiverForSequenceClassification",
        {"vocab_size": 99, "d_model": 32, "d_latents": 32, "num_latents": 6, "num_self_attends_per_block": 2}
        | {"num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": 12}
        | {"num_labels": 3, "attention_probs_dropout_prob": 0.1},
        "inputs",
    ),
}


def _inputs(kind: str, vocabulary: int) -> Any:
    ids = torch.randint(3, vocabulary, (3, 12))
    if kind == "masked":
        mask = (torch.arange(12)[None] < torch.tensor([12, 9, 6])[:, None]).long()
        return (ids,), {"attention_mask": mask}
    if kind == "pairs":
        return (), {"input_ids": ids, "decoder_input_ids": torch.randint(3, vocabulary, (3, 6))}
    if kind == "ending":  # one end-of-sequence token each, which the classification head looks for
        return torch.cat([ids[:, :-1], torch.full((3, 1), 2)], 1)
    return ((), {"inputs": ids}) if kind == "inputs" else ids


def _build(config: str, model: str, options: dict[str, Any], kind: str) -> Built:
    import transformers

    options = dict(options)
    attention = {"attn_implementation": "eager"} if options.pop("eager", False) else {}
    configured = getattr(transformers, config)(**options, **attention)
    network = getattr(transformers, model)(configured)
    if kind == "ending":  # these return their encoder's states beside the classes
        network = Only(network, "logits")
    return network, _inputs(kind, options["vocab_size"])


for _name, _arguments in NETWORKS.items():
    add(f"transformers_{_name}", functools.partial(_build, *_arguments), "transformers")
