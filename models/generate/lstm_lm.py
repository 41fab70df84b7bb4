"""A language model: an LSTM that foretells the next word."""

from __future__ import annotations

from .writer import XAVIER, Net

VOCABULARY = 33278  # that of WikiText-2


def lstm_lm(deploy: bool, vocabulary: int = VOCABULARY, units: int = 256, steps: int = 1408, streams: int = 40) -> Net:
    """Words as vectors, an LSTM over them, a score for each word; blobs are (steps, streams, ...).

    As many values for a word as there are units. Gradients go back through all steps of a batch.
    """
    title = "A language model: words as vectors, an LSTM, a score for each word"
    net = Net("LSTM-LM", "lstm_lm", title, (streams,), deploy, False, {"cont": (streams,), "label": (streams,)})
    net.hdf5(train=steps, test=steps, deploy=1)
    table = {"input_dim": vocabulary, "num_output": units, "bias_term": False}
    options = {"num_output": units}
    if not deploy:
        table["weight_filler"] = {"type": "uniform", "min": -0.1, "max": 0.1}
        options |= {"weight_filler": XAVIER, "bias_filler": {"type": "constant", "value": 0}}
    blob = net.layer("embed", "Embed", "data", "embed", embed_param=table)
    blob = net.layer("lstm", "LSTM", [blob, "cont"], "lstm", recurrent_param=options)
    net.head(net.fc("fc", blob, vocabulary, axis=2), top5=False, axis=2)
    return net
