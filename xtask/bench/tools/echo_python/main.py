from agentd_tool import run

run(lambda arguments, context: arguments)
