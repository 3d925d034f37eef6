"""Training without the compiler does not load it, and with it gets the real one."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from types import ModuleType
import torch
from instep.recipe.quick_start import spare_dynamo

assert "torch._dynamo" not in sys.modules
spare_dynamo()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
scheduler.step()
optimizer.zero_grad()
assert "torch._dynamo.eval_frame" not in sys.modules, "the compiler was loaded"
assert type(sys.modules["torch._dynamo"]) is not ModuleType

compiled = torch.compile(model, backend="eager")
assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))
assert "torch._dynamo.eval_frame" in sys.modules, "the compiler is missing"
assert type(sys.modules["torch._dynamo"]) is ModuleType
compiled(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
wrapped = torch.optim.Optimizer.add_param_group.__wrapped__
assert wrapped.__dict__["__dynamo_disable"] is not wrapped, "it is open to the compiler"
before = sys.modules["torch._dynamo"]
spare_dynamo()
assert sys.modules["torch._dynamo"] is before, "a loaded compiler was replaced"
print("all is well")
"""


@pytest.mark.slow
def test_the_compiler_is_spared_until_it_is_asked_for():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all is well\n"
