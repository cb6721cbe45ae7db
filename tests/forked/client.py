"""Asks the server for a program with the folder, environment and streams of this process, and ends as it does.

Run as `python -IS client.py SOCKET ARGUMENT...`: nothing is imported that takes time.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# What comes before there is somebody to pass it on to waits.
signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
address, *arguments = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as server:
    server.connect(address)
    socket.send_fds(server, [b"."], [0, 1, 2])
    order = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
    server.sendall(json.dumps(order).encode() + b"\n")
    told = server.makefile()
    program = int(told.readline())
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(program, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = int(told.readline())
if code < 0:  # a signal ended it
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
