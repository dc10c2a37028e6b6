"""Reward functions that leave processes behind, take too much, or write too much."""

import json
import mmap
import os
import re
import subprocess
import sys
import time

SLEEP = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"


def leave(response: str, answer: object, **columns: object) -> float:
    """Starts a process that gets away in the way that is named, writes its id to a file, and then
    does what comes after."""
    how, file, then = response.split(" ")
    command = [sys.executable, "-c", SLEEP, file]
    if how == "session":
        subprocess.Popen(command, start_new_session=True, close_fds=False)
    elif how == "clean":  # a new session and no environment
        subprocess.Popen(command, start_new_session=True, env={})
    elif how == "daemon":  # two forks: its parent has ended
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.execv(sys.executable, command)
        os.wait()
    while not os.path.exists(file) or os.path.getsize(file) == 0:
        time.sleep(0.01)
    if then == "hang":
        time.sleep(600)
    elif then == "exit":
        os._exit(3)
    elif then == "regex":  # it holds the interpreter's lock
        re.match(r"(a*)*b", "a" * 60)
    return 1.0


def grow(response: str, answer: object, **columns: object) -> float:
    what, _, number = response.partition(" ")
    if what == "memory":
        return float(len(bytearray(int(number) << 20)))
    if what == "reserve":  # as CUDA does: address space that is not used
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mmap.mmap(-1, int(number) << 30, flags, mmap.PROT_READ).close()
    elif what == "file":
        with open(number, "wb") as file:
            file.write(bytes(2 << 20))
    elif what == "processes":
        for _ in range(int(number)):
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        time.sleep(600)
    elif what == "print":
        for i in range(int(number)):
            sys.stdout.write(f"{i}: {'x' * 100}\n")
    elif what == "crash":
        os.abort()
    return 1.0


def environment(response: str, answer: object, **columns: object) -> float:
    """Writes all variables to the file that the response names; raises for one that is missing."""
    if response.startswith("/"):
        with open(response, "w") as file:
            json.dump(dict(os.environ), file)
        return 1.0
    return float(len(os.environ[response]))


def lie(response: str, answer: object, **columns: object) -> float:
    """Writes the response to the connection, and goes on as it says."""
    text, _, then = response.partition(" then ")
    if text:
        os.write(int(sys.argv[1]), text.encode() + (b"" if then == "drip" else b"\n"))
    if then == "stream":  # messages that look right, for ever
        while True:
            os.write(int(sys.argv[1]), text.encode() + b"\n")
    if then == "drip":  # half a message, a byte at a time
        while True:
            os.write(int(sys.argv[1]), b" ")
            time.sleep(0.01)
    if then.startswith("sleep"):
        time.sleep(float(then.split()[1]))
    return 1.0
