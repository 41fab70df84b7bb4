"""SqueezeNet v1.1."""

from __future__ import annotations

from .writer import AVE, MAX, Net, gaussian

FIRES = ((2, 16), (3, 16), (4, 32), (5, 32), (6, 48), (7, 48), (8, 64), (9, 64))  # number, squeezed channels
POOL_AFTER = (3, 5)


def squeezenet(deploy: bool) -> Net:
    """Iandola et al. 2016, version 1.1: 3x3 first convolution and earlier pooling, 2.4 times less work than 1.0."""
    title = "SqueezeNet v1.1 (Iandola et al. 2016)"
    net = Net("SqueezeNet", "squeezenet", title, (3, 227, 227), deploy, bias_doubled=False)
    blob = net.data(train=32, test=25, deploy=10)
    blob = net.relu("relu_conv1", net.conv("conv1", blob, 64, 3, stride=2))
    blob = net.pool("pool1", blob, MAX, 3, stride=2)
    for number, squeezed in FIRES:
        blob = _fire(net, f"fire{number}", blob, squeezed)
        if number in POOL_AFTER:
            blob = net.pool(f"pool{number}", blob, MAX, 3, stride=2)
    blob = net.dropout("drop9", blob, 0.5)
    blob = net.relu("relu_conv10", net.conv("conv10", blob, 1000, 1, weight=gaussian(0.01)))
    net.head(net.pool("pool10", blob, AVE))
    return net


def _fire(net: Net, fire: str, bottom: str, squeezed: int) -> str:
    def conv(part: str, source: str, outputs: int, kernel: int) -> str:
        name = f"{fire}/{part}"
        net.conv(name, source, outputs, kernel, pad=kernel // 2)
        return net.relu(f"{fire}/relu_{part}", name)

    blob = conv("squeeze1x1", bottom, squeezed, 1)
    return net.concat(
        f"{fire}/concat", [conv("expand1x1", blob, 4 * squeezed, 1), conv("expand3x3", blob, 4 * squeezed, 3)]
    )
