#pragma once

extern "C" {
void objc_msgSend();
// For results that do not fit into registers, which nothing here sends.
void objc_msgSend_stret();
void objc_msgSend_fpret();
}
