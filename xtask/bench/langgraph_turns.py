"""The scripted conversation of `cargo xtask bench`, played by LangGraph with its SQLite checkpointer.

Arguments: the model server's base URL, the checkpointer's file, the goal. Prints two numbers in milliseconds: a turn, and that
part of it which the request to the model took.
"""
import json
import operator
import sys
import time
import urllib.request
from typing import Annotated, TypedDict

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph

base_url, database, goal = sys.argv[1:]
asked = []


class State(TypedDict):
    messages: Annotated[list, operator.add]


def model(state):
    body = {"model": "scripted", "messages": state["messages"], "tools": [{"type": "function", "function": {
        "name": "echo_c", "description": "Gives its arguments back.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}}]}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    begun = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    asked.append(time.perf_counter() - begun)
    return {"messages": [message]}


def tools(state):
    calls = state["messages"][-1]["tool_calls"]
    return {"messages": [{"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]}
                         for call in calls]}


graph = StateGraph(State)
graph.add_node("model", model)
graph.add_node("tools", tools)
graph.add_edge(START, "model")
graph.add_conditional_edges("model", lambda state: "tools" if state["messages"][-1].get("tool_calls") else END)
graph.add_edge("tools", "model")
with SqliteSaver.from_conn_string(database) as saver:
    app = graph.compile(checkpointer=saver)
    config = {"configurable": {"thread_id": "1"}, "recursion_limit": 1000}
    first = {"messages": [{"role": "user", "content": goal}]}
    begun = time.perf_counter()
    app.invoke(first, config, durability="sync")
    took = time.perf_counter() - begun
print(1000 * took / len(asked), 1000 * sum(asked) / len(asked))
