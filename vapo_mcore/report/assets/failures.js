// Record the errors of the scripts in the page: the test in a browser reads them.
const failures = [];
function fail(message) {
  failures.push(message);
  document.documentElement.dataset.errors = JSON.stringify(failures);
}
window.addEventListener("error", (event) => fail(event.message));
window.addEventListener("unhandledrejection", (event) => fail(String(event.reason)));
document.documentElement.dataset.errors = "[]";
