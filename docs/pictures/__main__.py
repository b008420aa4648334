"""Write the pictures of README and docs: `python -m docs.pictures`.

`--train` first trains the networks of the demo and of the tutorial again, which takes a minute.
"""

import json
import sys

from docs.pictures import graph, heartbeats, idea, one_file, paths, recipes, resets, strides, tasks
from docs.pictures.frame import FOLDER

if "--train" in sys.argv:
    idea.MEASURED.write_text(json.dumps(idea.train()) + "\n", encoding="utf-8")
    heartbeats.MEASURED.write_text(json.dumps(heartbeats.train()) + "\n", encoding="utf-8")
for module in (graph, heartbeats, idea, one_file, paths, recipes, resets, strides, tasks):
    for name, svg in module.draw().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
        print(f"{name}: {len(svg) / 1000:.1f} kB")
