import sys
from pathlib import Path

import pytest

# The oracle and the generator live beside the tests and are imported by name.
sys.path.insert(0, str(Path(__file__).parent))

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.toml"


@pytest.fixture
def example() -> Path:
    return EXAMPLE
