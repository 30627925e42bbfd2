"""Run by this Python with sentence-transformers on its path. It takes a JSON list of requests from its input, with the
keys model (a folder), out (a folder to save the whole model in), pools, dense (the widths of dense layers),
include_prompt, texts and prompts; it saves the vectors of the texts by prompt in OUT.npz."""

import json
import sys

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

PROMPTS = {"query": "ask: ", "document": ""}

for request in json.load(sys.stdin):
    torch.manual_seed(0)
    first = Transformer(request["model"])
    width = first.get_embedding_dimension()
    modules = [first, Pooling(width, request["pools"], request["include_prompt"])]
    width *= len(request["pools"])
    for place, wide in enumerate(request["dense"]):
        activation = torch.nn.Tanh() if place else torch.nn.Identity()
        modules.append(Dense(width, wide, bias=bool(place), activation_function=activation))
        width = wide
    model = SentenceTransformer(modules=[*modules, Normalize()], prompts=PROMPTS, device="cpu")
    model.max_seq_length = 100
    model.save(request["out"])
    vectors = {str(prompt): model.encode(request["texts"], prompt_name=prompt) for prompt in (None, *PROMPTS)}
    np.savez(f"{request['out']}.npz", **vectors)
