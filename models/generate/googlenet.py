"""GoogLeNet (Inception v1)."""

from __future__ import annotations

from .writer import AVE, MAX, Net

# (block, outputs of: 1x1, 3x3 reduction, 3x3, 5x5 reduction, 5x5, pool projection), Table 1 of the paper
BLOCKS = (
    ("3a", (64, 96, 128, 16, 32, 32)),
    ("3b", (128, 128, 192, 32, 96, 64)),
    ("4a", (192, 96, 208, 16, 48, 64)),
    ("4b", (160, 112, 224, 24, 64, 64)),
    ("4c", (128, 128, 256, 24, 64, 64)),
    ("4d", (112, 144, 288, 32, 64, 64)),
    ("4e", (256, 160, 320, 32, 128, 128)),
    ("5a", (256, 160, 320, 32, 128, 128)),
    ("5b", (384, 192, 384, 48, 128, 128)),
)
POOL_AFTER = {"3b": "pool3/3x3_s2", "4e": "pool4/3x3_s2"}
LOSS_AFTER = {"4a": "loss1", "4d": "loss2"}
BIAS = 0.2


def googlenet(deploy: bool) -> Net:
    """Szegedy et al. 2014, with its two auxiliary classifiers in the train/test file."""
    net = Net("GoogLeNet", "googlenet", "GoogLeNet (Szegedy et al. 2014)", (3, 224, 224), deploy)
    blob = _stem(net)
    for block, widths in BLOCKS:
        blob = _inception(net, f"inception_{block}", blob, widths)
        if block in POOL_AFTER:
            blob = net.pool(POOL_AFTER[block], blob, MAX, 3, stride=2)
        if block in LOSS_AFTER and not deploy:
            _auxiliary(net, LOSS_AFTER[block], blob)
    blob = net.pool("pool5/7x7_s1", blob, AVE, 7)
    blob = net.dropout("pool5/drop_7x7_s1", blob, 0.4)
    scores = net.fc("loss3/classifier", blob, 1000)
    if deploy:
        net.head(scores)
    else:
        _classifier_losses(net, "loss3", "loss3/loss3", scores, 1)
    return net


def _conv(net: Net, block: str, part: str, bottom: str, outputs: int, kernel: int, relu: str, stride: int = 1) -> str:
    """A convolution that keeps the plane's size (over stride) and its rectifier."""
    name = f"{block}/{part}"
    net.conv(name, bottom, outputs, kernel, stride=stride, pad=kernel // 2, bias=BIAS)
    return net.relu(f"{block}/{relu}", name)


def _stem(net: Net) -> str:
    blob = net.data(train=32, test=50, deploy=10)
    blob = _conv(net, "conv1", "7x7_s2", blob, 64, 7, "relu_7x7", stride=2)
    blob = net.norm("pool1/norm1", net.pool("pool1/3x3_s2", blob, MAX, 3, stride=2))
    blob = _conv(net, "conv2", "3x3_reduce", blob, 64, 1, "relu_3x3_reduce")
    blob = _conv(net, "conv2", "3x3", blob, 192, 3, "relu_3x3")
    return net.pool("pool2/3x3_s2", net.norm("conv2/norm2", blob), MAX, 3, stride=2)


def _inception(net: Net, block: str, bottom: str, widths: tuple[int, ...]) -> str:
    def conv(part: str, source: str, outputs: int, kernel: int) -> str:
        return _conv(net, block, part, source, outputs, kernel, f"relu_{part}")

    one, reduce3, three, reduce5, five, projection = widths
    parts = [conv("1x1", bottom, one, 1)]
    parts.append(conv("3x3", conv("3x3_reduce", bottom, reduce3, 1), three, 3))
    parts.append(conv("5x5", conv("5x5_reduce", bottom, reduce5, 1), five, 5))
    pooled = net.pool(f"{block}/pool", bottom, MAX, 3, pad=1)
    parts.append(conv("pool_proj", pooled, projection, 1))
    return net.concat(f"{block}/output", parts)


def _auxiliary(net: Net, head: str, bottom: str) -> None:
    blob = net.pool(f"{head}/ave_pool", bottom, AVE, 5, stride=3)
    blob = _conv(net, head, "conv", blob, 128, 1, "relu_conv")
    blob = net.relu(f"{head}/relu_fc", net.fc(f"{head}/fc", blob, 1024, bias=BIAS))
    blob = net.dropout(f"{head}/drop_fc", blob, 0.7)
    _classifier_losses(net, head, f"{head}/loss", net.fc(f"{head}/classifier", blob, 1000), 0.3)


def _classifier_losses(net: Net, head: str, loss: str, scores: str, weight: float) -> None:
    # The blobs are named loss1/loss1, loss2/loss1 and loss3/loss3 in Caffe's file, and log readers look for these.
    top = "loss3/loss3" if head == "loss3" else f"{head}/loss1"
    net.loss(loss, scores, top=top, weight=weight)
    net.accuracy(f"{head}/top-1", scores)
    net.accuracy(f"{head}/top-5", scores, top_k=5)
