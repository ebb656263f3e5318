"""Connections to a host, as a tool of `cargo xtask bench` makes them, and the same program outside.

Arguments: host, port, bytes to fetch, the port of a CONNECT proxy or nothing. Prints three numbers in milliseconds: the median of a new
connection with a byte to and fro, the median of a byte to and fro on one that stands, and the time in which the bytes came.
"""
import socket
import statistics
import sys
import time

host, port, count, proxy = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def connect(purpose):
    connection = socket.create_connection(("127.0.0.1", int(proxy)) if proxy else (host, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if proxy:
        connection.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\n\r\n".encode())
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += connection.recv(1)
    connection.sendall(purpose.encode() + b"\n")
    return connection


def there_and_back(connection):
    connection.sendall(b"x")
    if connection.recv(1) != b"x":
        raise SystemExit("the far end has gone")


def milliseconds(work):
    begun = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begun)


def anew():
    with connect("echo") as connection:
        there_and_back(connection)


def fetch():
    buffer, left = bytearray(1 << 20), count
    with connect(f"send {count}") as connection:
        while left:
            got = connection.recv_into(buffer)
            if not got:
                raise SystemExit("the far end has gone")
            left -= got


connecting = statistics.median(milliseconds(anew) for _ in range(50))
with connect("echo") as standing:
    round_trip = statistics.median(milliseconds(lambda: there_and_back(standing)) for _ in range(1000))
print(connecting, round_trip, milliseconds(fetch))
