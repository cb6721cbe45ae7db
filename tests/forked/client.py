"""Asks the server to fork a program with this process's folder, environment and streams; exits like that program.

Run as `python -IS client.py SOCKET ARGUMENT...`. It imports only small modules, so that it starts quickly.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Hold signals back until there is a program to forward them to.
signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
address, *arguments = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as server:
    server.connect(address)
    socket.send_fds(server, [b"."], [0, 1, 2])
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
    server.sendall(json.dumps(request).encode() + b"\n")
    replies = server.makefile()
    program = int(replies.readline())
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(program, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = int(replies.readline())
if code < 0:  # a signal killed the program
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
