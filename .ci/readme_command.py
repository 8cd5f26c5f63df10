"""Prints the command of README.md that stands in the code block under ``<!-- ci: NAME -->``.

What a reader copies and what is tested are one text this way.
"""

import re
import sys
from pathlib import Path

name, readme = sys.argv[1], Path(sys.argv[2])
found = re.findall(rf"<!-- ci: {re.escape(name)} -->\n```\w*\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
if len(found) != 1:
    sys.exit(f"{readme.name}: {len(found)} code blocks under '<!-- ci: {name} -->', expected 1")
print(found[0], end="")
