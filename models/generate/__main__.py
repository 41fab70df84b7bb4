"""The command `python -m models.generate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .alexnet import alexnet, caffenet
from .densenet264 import densenet264
from .googlenet import googlenet
from .inception_v3 import inception_v3
from .lstm_lm import lstm_lm
from .resnet50 import resnet50
from .resnet50_v2 import resnet50_v2
from .resnet1001 import resnet1001
from .squeezenet import squeezenet
from .vgg16 import vgg16
from .vnet import vnet

NETS = (
    alexnet, caffenet, densenet264, googlenet, inception_v3, lstm_lm, resnet50, resnet50_v2, resnet1001, squeezenet,
    vgg16, vnet,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m models.generate", description="Write train_val.prototxt and deploy.prototxt of the larger nets."
    )
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("--into", type=Path, default=here, metavar="DIR", help="folder to write to (default: models)")
    into = parser.parse_args().into
    for build in NETS:
        for name, deploy in (("train_val", False), ("deploy", True)):
            net = build(deploy)
            path = into / net.folder / f"{name}.prototxt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(net.text(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
