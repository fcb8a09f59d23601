package verbs_test

// childEnv names what a child process of the tests is to do.
const childEnv = "PINDOWN_VERBS_CHILD"

// children are the programs of child processes, by childEnv.
var children = map[string]func(){}
