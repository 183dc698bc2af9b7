"""All mutations, by the environment that runs their tests."""

from __future__ import annotations

from tests.mutants.core import CORE
from tests.mutants.cuda import CUDA
from tests.mutants.mutation import Environment, Mutation
from tests.mutants.release import RELEASE
from tests.mutants.vllm import VLLM

MUTATIONS: dict[Environment, tuple[Mutation, ...]] = {
    "core": (*CORE, *CUDA, *RELEASE),
    "vllm": VLLM,
}
