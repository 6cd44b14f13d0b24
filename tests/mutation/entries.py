"""Ways to break the files of compiled kernels: what an entry is bound to, and who may have written it."""

import targets as t
from targets import Mutant

ENTRIES = [
    Mutant("another user's entry taken", t.CACHE, "status.st_uid not in (0, os.geteuid()) or ", "",
           (f"{t.CACHED}test_entry_of_another_user_is_not_taken_but_replaced",)),
    Mutant("what the group may write trusted", t.CACHE, "stat.S_IWGRP | stat.S_IWOTH", "stat.S_IWOTH",
           (f"{t.CACHED}test_entry_that_others_may_write_is_not_taken_but_replaced",)),
    Mutant("root not trusted", t.CACHE, "not in (0, os.geteuid())", "!= os.geteuid()",
           (f"{t.CACHED}test_entry_of_root_is_taken",)),
]  # fmt: skip
