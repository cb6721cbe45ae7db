// Wide tables, code and diagrams scroll sideways. Those that do can be reached, and scrolled, with the keyboard.
'use strict';

function reachable() {
  for (const element of document.querySelectorAll('article pre, article .table-wrapper, article .scrolling')) {
    if (element.scrollWidth > element.clientWidth) element.setAttribute('tabindex', '0');
    else element.removeAttribute('tabindex');
  }
}

window.addEventListener('load', reachable);
window.addEventListener('resize', reachable);
document.addEventListener('drawn', reachable);
