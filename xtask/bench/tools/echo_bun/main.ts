import { run } from "./index.js";

run((args) => args);
