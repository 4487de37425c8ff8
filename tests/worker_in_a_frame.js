// A page from disk with just enough of a document for the worker in a frame: the script in the frame echoes messages.
const fs = require("fs")
globalThis.location = { protocol: "file:" }
globalThis.window = globalThis
globalThis.MessageEvent = class extends Event {
  constructor(kind, { data }) {
    super(kind)
    this.data = data
  }
}
class Frame {
  constructor() {
    const inner = new EventTarget()
    inner.document = {
      open() {},
      write(text) {
        if (!text.includes('src="file:///site/echo.js"')) throw new Error(text)
        inner.addEventListener("message", event => inner.postMessage(event.data))
      },
      close: () => setTimeout(() => inner.dispatchEvent(new Event("load"))),
    }
    this.contentWindow = inner
  }
}
globalThis.document = { baseURI: "file:///site/index.html", createElement: () => new Frame(), body: { append() {} } }
;(0, eval)(fs.readFileSync(process.argv[1], "utf8"))
const worker = new Worker("echo.js")
worker.addEventListener("message", event => console.log(event.data))
worker.postMessage("early")
setTimeout(() => worker.postMessage("late"), 20)
