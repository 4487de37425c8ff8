/* Browsers start no workers in pages that are opened from disk. The search of this site is one: run it in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      inner.document.open()
      // The script answers with postMessage(), which has no second argument in a worker.
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inner.addEventListener("load", () => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach(data => this.deliver(data))
      })
      inner.document.write(`<script src="${new URL(url, document.baseURI).href}"></` + "script>")
      inner.document.close()
    }

    /* Messages that come before the script has run wait for it. */
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.deliver(data)
    }

    deliver(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
