"""What a script may do with a net, by a word: for tests that do it to two nets in any order."""

WAYS = ["forward", "start", "end", "between", "backward", "down from", "down to", "read", "gradient", "sum", "write"]


def call_net(net, way, low, high, blob, value):
    """Do it, with layers from `low` to `high`, a blob, and a value to write to it; what it gives, by name."""
    if way == "write":
        net.blobs[blob].data.flat[0] = value
        return {}
    return {
        "forward": lambda: net.forward(),
        "start": lambda: net.forward(start=low),
        "end": lambda: net.forward(end=high),
        "between": lambda: net.forward(start=low, end=high),
        "backward": lambda: net.backward(),
        "down from": lambda: net.backward(start=high),
        "down to": lambda: net.backward(start=high, end=low),
        "read": lambda: {blob: net.blobs[blob].cpu_data()},
        "gradient": lambda: {blob: net.blobs[blob].cpu_diff()},
        "sum": lambda: {blob: net.blobs[blob].asum_data()},
    }[way]()
