"""Data sets (digits, MNIST, CIFAR-10, ImageNet-style folders), one file each, and their splits."""
