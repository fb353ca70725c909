"""A process that serves a fake engine whose sequences take a minute, and reports in the end whether it was closed."""

import sys

import fake_engine

from jspec.serve import server
from jspec.serve.app import Service
from jspec.serve.openai import Limits

engine = fake_engine.FakeEngine(endless=True, delay=0.05, step=1, context=2000)
bound = server.bind("127.0.0.1", 0)
service = Service(engine, name="fake", limits=Limits(engine.context))
server.make_server(service, bound, grace=float(sys.argv[1])).run(sockets=[bound])
