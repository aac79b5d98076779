// A driver from before the functions that farpool needs.
extern "C" int cuDriverGetVersion(int* version) {
    *version = 10010;
    return 0;
}
