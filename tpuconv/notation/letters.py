"""The letters of axes. A letter has the same meaning in every layout, einsum, shape and sharding."""

LETTERS = {
    "B": "batch",
    "T": "time: positions of this call's tokens",
    "S": "source positions: the keys that attention looks at",
    "D": "model width (hidden size)",
    "A": "model width, as the input axis of a square matrix",
    "N": "query heads",
    "K": "key-value heads, or groups of heads with an output projection of their own",
    "G": "query heads per key-value head (N = K G)",
    "H": "head dimension",
    "F": "MLP width",
    "V": "vocabulary",
    "O": "labels: the scores of a text",
    "L": "layers",
    "I": "layers with a dense MLP, in a model where others have experts",
    "J": "layers with experts, in a model where others have a dense MLP, or choose experts by token ids (I)",
    "U": "layers for multi-token prediction (MTP), after the model's own",
    "E": "experts",
    "M": "MLP width of one expert",
    "W": "MLP width of all shared experts together",
    "C": "latent width of keys and values (kv_lora_rank), of what experts read and write, or of a group of heads; "
    "width of the embeddings of n-grams",
    "Q": "latent width of queries (q_lora_rank)",
    "u": "latent width of queries, with their norm and without; residual streams e, as an output",
    "d": "width of the gates of norms, or of residual streams; weights of residual streams in a model with linear "
    "attention; rank of a low-rank residual",
    "e": "residual streams besides the first, or in a model with linear attention",
    "P": "head dimension without rotary position",
    "R": "head dimension with rotary position",
    "x": "head dimension of an indexer",
    "f": "layers with full attention, in a model where others have linear attention; layers with an indexer",
    "l": "layers with linear attention, Mamba-2 or a short convolution; with heavily compressed keys",
    "n": "key heads of linear attention, groups of Mamba-2 or of heads in a fused projection, channels of a short "
    "convolution, heads of an indexer",
    "r": "value heads per key head of linear attention, heads per group n, residual streams",
    "k": "dimension of a key head of linear attention, state size of Mamba-2, weights of residual streams",
    "w": "dimension of a value head, of linear attention or where it is not that of keys; of a head of Mamba-2; "
    "residual streams, as an output",
    "c": "taps of a causal convolution, tokens of a compressed key",
    # Of models in which layers that see all tokens and those with a sliding window differ in size, or those with and
    # without rotary positions
    "s": "layers with a sliding window, or with rotary positions",
    "g": "layers that see all tokens, or without rotary positions; with latent attention, some with an indexer (f)",
    "a": "layers with a sliding window, or with rotary positions, and keys and values of their own; layers with "
    "embeddings of n-grams",
    "b": "layers that see all tokens, or without rotary positions, with keys and values of their own",
    "o": "layers that use the keys and values of an earlier one",
    "h": "head dimension of layers that see all tokens; taps of a convolution of n-grams",
    "m": "key-value heads of layers that see all tokens",
    "q": "query heads of layers that see all tokens; heads of an indexer, in a model with linear attention",
    "i": "layers with an MLP of width F",
    "j": "layers with an MLP of width y",
    "y": "the larger MLP width, of two; experts that pass their input on",
    # Of models in which each layer has embeddings of its own
    "p": "width of the embeddings of a layer or of one n-gram, tokens of a heavily compressed key or of a pool of keys",
    "v": "vocabulary of the embeddings of layers, or added to V; parts of a table of n-grams; learned positions",
    "z": "layers, as an axis of embeddings and of a projection for all of them; n-grams of a part of their table; "
    "experts (E) and those that pass their input on (y)",
    # Of what other programs expect
    "X": "experts of a token; half of the head dimension, of which rotary position takes one element from each half; "
    "pairs of dimensions with rotary position",
    # Of models whose layers repeat with a period
    "Y": "periods of layers: the first layer of each",
    "Z": "places of a period whose layers are in one array",
    "t": "layers after the last complete period",
}
