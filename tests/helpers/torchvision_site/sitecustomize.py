"""Lets torchvision be imported beside a torch for CPUs: PyPI's torchvision is built for CUDA, so that its operators are
missing. Image processors use none of them. Python runs this file at its start."""

import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
