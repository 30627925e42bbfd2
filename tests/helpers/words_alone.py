"""Prints the families whose words are not declared where their module alone is loaded: a child for each module."""

import os
import re
from collections import defaultdict

from tpuconv.models.families import DRAFT_FAMILIES, FAMILIES
from tpuconv.models.registry import get_family
from tpuconv.notation.letters import sharded_as


def main() -> None:
    by_module = defaultdict(list)
    for name, module in (FAMILIES | DRAFT_FAMILIES).items():
        by_module[module].append(name)
    for names in by_module.values():
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            for name in names:
                layouts = " ".join(row.layout.partition("->")[2] or row.layout for row in get_family(name).table.rows)
                for word in set(re.findall("[a-z][a-z_]+", layouts)):
                    sharded_as(word)
        except BaseException as error:
            print(name, error, flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
