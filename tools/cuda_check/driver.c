// A libcuda.so that pretends to be one H200 in host memory: allocations and copies are real, kernels are accepted and not run.
//
// With it every kernel that a program generates can be compiled by the real NVRTC on a machine without a GPU (scripts/cuda_check.sh).
// CUDA_CHECK_REPORT=1 prints at exit how many modules were loaded and kernels launched; CUDA_CHECK_DUMP=FOLDER keeps the PTX of each module.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
typedef int R; typedef uint64_t P; typedef void* H;
static int nmod=0,nlaunch=0;
__attribute__((destructor)) static void rep(void){ if(getenv("CUDA_CHECK_REPORT")) fprintf(stderr,"modules %d, launches %d\n",nmod,nlaunch);}
R cuInit(unsigned f){return 0;}
R cuDriverGetVersion(int*v){*v=13000;return 0;}
R cuDeviceGetCount(int*c){*c=1;return 0;}
R cuDeviceGet(int*d,int o){*d=o;return o==0?0:101;}
R cuDeviceGetName(char*n,int l,int d){snprintf(n,l,"NVIDIA H200");return 0;}
R cuDeviceGetUuid_v2(void*u,int d){memset(u,1,16);return 0;}
R cuDeviceTotalMem_v2(size_t*b,int d){*b=(size_t)143771<<20;return 0;}
R cuDeviceGetPCIBusId(char*s,int l,int d){snprintf(s,l,"0000:01:00.0");return 0;}
R cuDeviceGetAttribute(int*v,int a,int d){
    switch(a){
    case 1:case 2:case 3:*v=1024;break;
    case 4:*v=64;break;
    case 5:*v=2147483647;break;
    case 6:case 7:*v=65535;break;
    case 8:*v=49152;break;
    case 10:*v=32;break;
    case 16:*v=132;break;
    case 38:*v=60<<20;break;
    case 75:*v=9;break;
    case 76:*v=0;break;
    case 81:*v=233472;break;
    case 97:*v=232448;break;
    default:*v=1;
    }
    return 0;
}
R cuDevicePrimaryCtxRetain(H*c,int d){*c=(H)0x1000;return 0;}
R cuDevicePrimaryCtxRelease_v2(int d){return 0;}
R cuCtxSetCurrent(H c){return 0;}
R cuCtxGetCurrent(H*c){*c=(H)0x1000;return 0;}
R cuCtxSynchronize(void){return 0;}
R cuCtxGetStreamPriorityRange(int*a,int*b){*a=0;*b=0;return 0;}
static uintptr_t nx=0x2000;
R cuStreamCreate(H*s,unsigned f){*s=(H)(nx+=16);return 0;}
R cuStreamCreateWithPriority(H*s,unsigned f,int p){*s=(H)(nx+=16);return 0;}
R cuStreamSynchronize(H s){return 0;}
R cuStreamQuery(H s){return 0;}
R cuStreamWaitEvent(H s,H e,unsigned f){return 0;}
R cuStreamDestroy_v2(H s){return 0;}
R cuEventCreate(H*e,unsigned f){*e=(H)(nx+=16);return 0;}
R cuEventRecord(H e,H s){return 0;}
R cuEventSynchronize(H e){return 0;}
R cuEventQuery(H e){return 0;}
R cuEventDestroy_v2(H e){return 0;}
R cuEventElapsedTime(float*m,H a,H b){*m=0.01f;return 0;}
R cuEventElapsedTime_v2(float*m,H a,H b){*m=0.01f;return 0;}
static R al(P*p,size_t n) {
    void*q=NULL;
    if(posix_memalign(&q,512,n?n:1))return 2;
    memset(q,0,n<(1u<<28)?n:0);
    *p=(P)q;
    return 0;
}
R cuMemAlloc_v2(P*p,size_t n){return al(p,n);}
R cuMemAllocAsync(P*p,size_t n,H s){return al(p,n);}
R cuMemFree_v2(P p){free((void*)p);return 0;}
R cuMemFreeAsync(P p,H s){free((void*)p);return 0;}
R cuMemAllocHost_v2(void**p,size_t n){P q;R r=al(&q,n);*p=(void*)q;return r;}
R cuMemFreeHost(void*p){free(p);return 0;}
R cuMemGetInfo_v2(size_t*f,size_t*t){*f=*t=(size_t)143771<<20;return 0;}
R cuMemcpyHtoDAsync_v2(P d,const void*s,size_t n,H st){memcpy((void*)d,s,n);return 0;}
R cuMemcpyDtoHAsync_v2(void*d,P s,size_t n,H st){memcpy(d,(void*)s,n);return 0;}
R cuMemcpyDtoDAsync_v2(P d,P s,size_t n,H st){memmove((void*)d,(void*)s,n);return 0;}
typedef struct{size_t sx,sy;int st;const void*sh;P sd;H sa;size_t sp;size_t dx,dy;int dt;void*dh;P dd;H da;size_t dp;size_t w,h;}M2;
R cuMemcpy2DAsync_v2(const M2*m,H s) {
    const char*a=m->st==1?m->sh:(void*)m->sd;
    char*b=m->dt==1?m->dh:(void*)m->dd;
    for(size_t i=0;i<m->h;i++)memcpy(b+(m->dy+i)*m->dp+m->dx,a+(m->sy+i)*m->sp+m->sx,m->w);
    return 0;
}
R cuMemsetD8Async(P p,unsigned char v,size_t n,H s){memset((void*)p,v,n);return 0;}
R cuModuleLoadData(H*m,const void*img) {
    char*t=strdup(img);
    *m=t;
    const char*d=getenv("CUDA_CHECK_DUMP");
    if(d){char f[512];snprintf(f,512,"%s/%04d.ptx",d,nmod);FILE*o=fopen(f,"w");if(o){fputs(t,o);fclose(o);}}
    nmod++;
    return 0;
}
R cuModuleGetFunction(H*f,H m,const char*n) {
    if(!strstr(m,n))return 500;
    *f=(H)(nx+=16);
    return 0;
}
R cuFuncSetAttribute(H f,int a,int v){return 0;}
R cuLaunchKernel(H f,unsigned a,unsigned b,unsigned c,unsigned x,unsigned y,unsigned z,unsigned sh,H s,void**p,void**e) {
    nlaunch++;
    if(x*y*z>1024||!a||!b||!c||sh>232448)return 1;
    return 0;
}
R cuLaunchKernelEx(const void*c,H f,void**p,void**e){nlaunch++;return 0;}
R cuTensorMapEncodeTiled(void*m){memset(m,0,128);return 0;}
R cuTensorMapEncodeIm2col(void*m){memset(m,0,128);return 0;}
R cuTensorMapEncodeIm2colWide(void*m){memset(m,0,128);return 0;}
R cuGetErrorName(R e,const char**s){*s="FAKE";return 0;}
R cuGetErrorString(R e,const char**s){*s="fake error";return 0;}
