"""An engine in a process of its own: answers one prompt and prints the answer as JSON.

python -m tests.vllm.other_engine MODEL SOCKET '{"prompt": [...], "layerwise_overlap": 1}'
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tests.vllm.engine import ENVIRONMENT, Engine


def main() -> None:
    os.environ.update(ENVIRONMENT)
    model, socket, request = sys.argv[1:]
    engine = Engine(Path(model), Path(socket))
    answer = engine.ask(store=False, **json.loads(request))
    engine.assert_idle()
    engine.close()
    print(json.dumps(asdict(answer)))


if __name__ == "__main__":
    main()
