"""Prototxt as text: fields to lines, and a net as a list of layers.

A net function builds both files of a model from one description. With `net.deploy` true the file has one Input layer,
no losses, and no fillers or learning rates, which a trained net does not need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 100  # a message that fits in this many columns stays on one line


class Word(str):
    """The name of an enum value: written without quotes."""


MAX, AVE, FLOOR = Word("MAX"), Word("AVE"), Word("FLOOR")
TRAIN, TEST = Word("TRAIN"), Word("TEST")
IMAGENET = ("ilsvrc12_train_lmdb", "ilsvrc12_val_lmdb")
IMAGENET_MEAN = (104, 117, 123)  # blue, green, red, in the order in which Caffe's databases hold them

Fields = Mapping[str, Any]


def inline(name: str, value: Any) -> str:
    """One field on one line; a mapping becomes a message, a sequence a repeated field."""
    if isinstance(value, Mapping):
        inner = " ".join(inline(key, item) for key, item in value.items())
        return f"{name} {{ {inner} }}"
    if isinstance(value, Word):
        return f"{name}: {value}"
    if isinstance(value, str):
        return f'{name}: "{value}"'
    if isinstance(value, bool):
        return f"{name}: {str(value).lower()}"
    if isinstance(value, Sequence):
        return " ".join(inline(name, item) for item in value)
    return f"{name}: {value}"


def lines(name: str, value: Any, indent: str = "") -> list[str]:
    """One field as indented lines; layers stay on one line only where they hold no message."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [line for item in value for line in lines(name, item, indent)]
    short = indent + inline(name, value)
    if not isinstance(value, Mapping):
        return [short]
    nests = any(isinstance(item, Mapping) for item in value.values())
    if len(short) <= WIDTH and not (name == "layer" and nests):
        return [short]
    body = [line for key, item in value.items() for line in lines(key, item, indent + "  ")]
    return [f"{indent}{name} {{", *body, f"{indent}}}"]


def gaussian(std: float) -> Fields:
    return {"type": "gaussian", "std": std}


def constant(value: float) -> Fields:
    return {"type": "constant", "value": value}


XAVIER: Fields = {"type": "xavier"}
MSRA: Fields = {"type": "msra"}


@dataclass
class Net:
    """A net under construction; every method adds layers and returns the name of the blob they write.

    `shape` is that of an item of `data` as the net sees it, mostly (channels, height, width); `further` has those of
    other inputs that are not one number an item. `folder` is the model's folder under `models/`. `bias_doubled`: biases
    learn twice as fast as weights and do not decay, as in Caffe's own nets.
    """

    name: str
    folder: str
    title: str
    shape: tuple[int, ...]
    deploy: bool
    bias_doubled: bool = True
    further: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layers: list[Fields] = field(default_factory=list)

    def text(self) -> str:
        """The whole file."""
        use = "deployment" if self.deploy else "training and testing"
        head = [
            f"# {self.title}, for {use}.",
            "# Written by `python -m models.generate`; change models/generate and run that.",
        ]
        if not self.deploy:
            stated = {"data": self.shape, **self.further}
            head += [f"# input-shape: {blob}=" + "x".join(map(str, dims)) for blob, dims in stated.items()]
        head.append(inline("name", self.name))
        return "\n".join(head + lines("layer", self.layers)) + "\n"

    def layer(self, name: str, kind: str, bottom: str | Sequence[str], top: str | Sequence[str], **rest: Any) -> str:
        """Any layer; `rest` are its further fields in order, those that are None left out. Returns the first top."""
        fields: dict[str, Any] = {"name": name, "type": kind}
        if bottom:
            fields["bottom"] = bottom
        fields["top"] = top
        fields.update({key: value for key, value in rest.items() if value is not None})
        self.layers.append(fields)
        return top if isinstance(top, str) else top[0]

    def data(
        self,
        train: int,
        test: int,
        deploy: int,
        *,
        databases: tuple[str, str] = IMAGENET,
        mean: Sequence[int] = IMAGENET_MEAN,
        scale: float | None = None,
    ) -> str:
        """The input: databases in this model's folder, in the deploy file an Input layer. Numbers are batch sizes."""
        if self.deploy:
            return self.layer("data", "Input", (), "data", input_param={"shape": {"dim": [deploy, *self.shape]}})
        for phase, database, batch in zip((TRAIN, TEST), databases, (train, test), strict=True):
            transform: dict[str, Any] = {} if scale is None else {"scale": scale}
            transform |= {"mirror": phase == TRAIN, "crop_size": self.shape[1], "mean_value": mean}
            source = f"models/{self.folder}/{database}"
            self.layer(
                "data",
                "Data",
                (),
                ["data", "label"],
                include={"phase": phase},
                transform_param=transform,
                data_param={"source": source, "batch_size": batch, "backend": Word("LMDB")},
            )
        return "data"

    def hdf5(self, train: int, test: int, deploy: int) -> str:
        """The input: HDF5 files that `python -m models.generate.data` writes, in the deploy file Input layers.

        Tops are `data` and the `further` ones, of which the deploy file lacks `label`. Numbers are rows in a batch.
        """
        shapes = {"data": self.shape, **self.further}
        if self.deploy:
            for top, dims in shapes.items():
                if top != "label":
                    self.layer(top, "Input", (), top, input_param={"shape": {"dim": [deploy, *dims]}})
            return "data"
        for phase, split, batch in ((TRAIN, "train", train), (TEST, "test", test)):
            source = {"source": f"models/{self.folder}/{split}_h5.txt", "batch_size": batch}
            self.layer("data", "HDF5Data", (), [*shapes], include={"phase": phase}, hdf5_data_param=source)
        return "data"

    def conv(
        self,
        name: str,
        bottom: str,
        outputs: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        pad: int | tuple[int, int] = 0,
        group: int = 1,
        weight: Fields = XAVIER,
        bias: float | None = 0,
        phase: Word | None = None,
    ) -> str:
        """A convolution; pairs are (height, width). `bias` is what the bias starts from, None for no bias."""
        param: dict[str, Any] = {"num_output": outputs}
        for key, value in (("pad", pad), ("kernel", kernel)):
            if isinstance(value, tuple):
                param |= {f"{key}_h": value[0], f"{key}_w": value[1]}
            elif value:
                param["kernel_size" if key == "kernel" else key] = value
        param |= {"stride": stride} if stride > 1 else {}
        param |= {"group": group} if group > 1 else {}
        return self._weighted(name, "Convolution", bottom, "convolution_param", param, weight, bias, phase)

    def deconv(self, name: str, bottom: str, outputs: int, kernel: int, *, stride: int, weight: Fields = XAVIER) -> str:
        """A transposed convolution with a bias."""
        param = {"num_output": outputs, "kernel_size": kernel, "stride": stride}
        return self._weighted(name, "Deconvolution", bottom, "convolution_param", param, weight, 0, None)

    def fc(
        self,
        name: str,
        bottom: str,
        outputs: int,
        *,
        axis: int = 1,
        weight: Fields = XAVIER,
        bias: float = 0,
        phase: Word | None = None,
    ) -> str:
        """A fully connected layer over `axis` and those after it; `bias` is what the bias starts from."""
        param = {"num_output": outputs} | ({"axis": axis} if axis != 1 else {})
        return self._weighted(name, "InnerProduct", bottom, "inner_product_param", param, weight, bias, phase)

    def _weighted(
        self,
        name: str,
        kind: str,
        bottom: str,
        key: str,
        param: dict[str, Any],
        weight: Fields,
        bias: float | None,
        phase: Word | None,
    ) -> str:
        rates = None
        if bias is None:
            param["bias_term"] = False
        elif self.bias_doubled and not self.deploy:
            rates = [{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 2, "decay_mult": 0}]
        if not self.deploy:
            param["weight_filler"] = weight
            param |= {} if bias is None else {"bias_filler": constant(bias)}
        return self.layer(name, kind, bottom, name, include=_only(phase), param=rates, **{key: param})

    def pool(
        self,
        name: str,
        bottom: str,
        method: Word,
        kernel: int | None = None,
        *,
        stride: int = 1,
        pad: int = 0,
        floor: bool = False,
        phase: Word | None = None,
    ) -> str:
        """A pooling; without `kernel` over the whole plane, with `floor` only of windows that fit into it."""
        param: dict[str, Any] = {"pool": method}
        param |= {"global_pooling": True} if kernel is None else {"kernel_size": kernel}
        param |= {"stride": stride} if stride > 1 else {}
        param |= {"pad": pad} if pad else {}
        param |= {"round_mode": FLOOR} if floor else {}
        return self.layer(name, "Pooling", bottom, name, include=_only(phase), pooling_param=param)

    def relu(self, name: str, blob: str, phase: Word | None = None) -> str:
        """In place."""
        return self.layer(name, "ReLU", blob, blob, include=_only(phase))

    def prelu(self, name: str, bottom: str) -> str:
        """With a slope for each channel, and a top of its own: its gradient needs the bottom."""
        return self.layer(name, "PReLU", bottom, name)

    def dropout(self, name: str, blob: str, ratio: float) -> str:
        """In place."""
        return self.layer(name, "Dropout", blob, blob, dropout_param={"dropout_ratio": ratio})

    def norm(self, name: str, bottom: str) -> str:
        """Local response normalisation over 5 channels, alpha 1e-4, beta 0.75."""
        return self.layer(name, "LRN", bottom, name, lrn_param={"local_size": 5, "alpha": 0.0001, "beta": 0.75})

    def batch_norm(
        self,
        norm: str,
        scale: str,
        bottom: str,
        *,
        top: str | None = None,
        eps: float | None = None,
        phase: Word | None = None,
    ) -> str:
        """BatchNorm, in place unless it has a `top`, and the Scale with bias that follows it, always in place.

        `eps` None leaves Caffe's 1e-5.
        """
        param = None if eps is None else {"eps": eps}
        blob = self.layer(norm, "BatchNorm", bottom, top or bottom, include=_only(phase), batch_norm_param=param)
        return self.layer(scale, "Scale", blob, blob, include=_only(phase), scale_param={"bias_term": True})

    def activation(self, block: str, part: str, bottom: str, top: str | None = None) -> str:
        """Batch norm, scale and rectifier; in place, or with another `top` where somebody else reads the bottom."""
        blob = self.batch_norm(f"{block}_bn{part}", f"{block}_scale{part}", bottom, top=top)
        return self.relu(f"{block}_relu{part}", blob)

    def preactivated(self, block: str, bottom: str, channels: int, strides: tuple[int, int], project: bool) -> str:
        """A bottleneck (He et al. 2016): 1x1, 3x3, 1x1 with four times the channels, each behind its activation, and
        added to the input. The first two have the strides.

        Where the block projects its input, the projection reads what the first activation gives; that one is in place
        then.
        """

        def conv(part: str, source: str, outputs: int, kernel: int, stride: int = 1) -> str:
            name = f"{block}_{part}"
            return self.conv(name, source, outputs, kernel, stride=stride, pad=kernel // 2, weight=MSRA, bias=None)

        first, second = strides
        blob = self.activation(block, "1", bottom, top=None if project else f"{block}_bn1")
        shortcut = conv("shortcut", blob, 4 * channels, 1, first * second) if project else bottom
        blob = conv("conv1", blob, channels, 1, first)
        blob = conv("conv2", self.activation(block, "2", blob), channels, 3, second)
        blob = conv("conv3", self.activation(block, "3", blob), 4 * channels, 1)
        return self.layer(block, "Eltwise", [shortcut, blob], block)

    def concat(self, name: str, bottoms: Sequence[str]) -> str:
        """Along the channels."""
        return self.layer(name, "Concat", bottoms, name)

    def head(self, scores: str, *, top5: bool = True, axis: int = 1) -> None:
        """What follows the last scores: a softmax in the deploy file, else accuracies (test phase) and the loss.

        Classes are along `axis`.
        """
        along = {"axis": axis} if axis != 1 else None
        if self.deploy:
            self.layer("prob", "Softmax", scores, "prob", softmax_param=along)
            return
        self.accuracy("accuracy", scores, axis=axis)
        if top5:
            self.accuracy("accuracy_top5", scores, top_k=5)
        self.loss("loss", scores, axis=axis)

    def accuracy(self, name: str, scores: str, top_k: int = 1, axis: int = 1) -> None:
        """In the test phase only."""
        param = ({"top_k": top_k} if top_k > 1 else {}) | ({"axis": axis} if axis != 1 else {})
        self.layer(name, "Accuracy", [scores, "label"], name, include=_only(TEST), accuracy_param=param or None)

    def loss(
        self,
        name: str,
        scores: str,
        *,
        top: str | None = None,
        weight: float | None = None,
        phase: Word | None = None,
        axis: int = 1,
    ) -> None:
        """Softmax and cross entropy."""
        along = {"axis": axis} if axis != 1 else None
        self.layer(
            name, "SoftmaxWithLoss", [scores, "label"], top or name,
            include=_only(phase), loss_weight=weight, softmax_param=along,
        )  # fmt: skip


def _only(phase: Word | None) -> Fields | None:
    return None if phase is None else {"phase": phase}
