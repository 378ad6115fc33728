"""The `python` tool in the form gpt-oss was trained on: code in, what it printed out, nothing kept in between.

    cage      starts the code: limits, identity, an own process; runs as a script of its own
    ways      what this machine allows: namespaces, who to run as, which interpreter
    running   one run from its code to its outcome
    server    the MCP server around it

What a run is kept from, everywhere: the environment of the server and its keys, its open files, standard input; more
CPU time, memory per process, file size, open files and wall-clock time than given; output without end; outliving its
call. It works in an empty folder that is deleted afterwards, and does not load the user's own packages.

On Linux, where the system permits namespaces, moreover: it has no network, not even this machine's own addresses; it
sees no processes but its own, and every one of them ends with the run, whatever it did to get away.

What it is not kept from: reading what the user it runs as may read, and writing where that user may write. Started by
root, every run is a user of its own who owns nothing; otherwise it is whoever started the server, home folder included,
and so are other runs at the same time. Processes together
may use the memory limit times the process limit. A fault in the kernel or the interpreter opens everything. So this is
no boundary against somebody who means harm: for code from strangers, put the server into a container or a virtual
machine that may be lost.
"""
