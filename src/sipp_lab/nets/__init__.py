"""The networks of the experiments, by name: `build("resnet20")`."""

from sipp_lab.nets.registry import INPUT_SHAPES, NETS, NetSpec, build, n_classes_in, net_spec

__all__ = ["INPUT_SHAPES", "NETS", "NetSpec", "build", "n_classes_in", "net_spec"]
