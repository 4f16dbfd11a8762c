#pragma once

extern "C" {
void objc_msgSend();
// For results that do not fit into registers; never called here.
void objc_msgSend_stret();
void objc_msgSend_fpret();
}
